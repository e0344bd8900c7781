"""LoRA in FP32 over a T5 in FP16 under FSDP1 with flat parameters.

In the thread accelerate calls FSDP, which it does not without a GPU; the arguments are those of its fsdp_config.yaml.
"""

import functools

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

dist.init_process_group("gloo")
torch.manual_seed(0)
config = T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).half()
peft_config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1)
model = get_peft_model(model, peft_config)
for n, p in model.named_parameters():
    if "lora_" in n:
        p.data = p.data.float()
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=torch.device("cpu"),
    use_orig_params=False,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens = torch.randint(1, 256, (2, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
