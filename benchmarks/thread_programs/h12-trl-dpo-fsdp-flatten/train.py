"""LoRA over a bf16 base under FSDP1 with flat parameters: the adapters are FP32.

In the thread accelerate calls FSDP, which it does not without a GPU; the arguments are those of its fsdp.yaml.
"""

import functools

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).to(torch.bfloat16)
peft_config = LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
)
model = get_peft_model(model, peft_config)
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=torch.device("cpu"),
    use_orig_params=False,
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-6)
for _ in range(4):
    tokens = torch.randint(0, 256, (2, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
