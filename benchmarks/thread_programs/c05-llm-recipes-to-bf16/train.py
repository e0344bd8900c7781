"""FSDP1 in bf16: `model.to(torch.bfloat16)` casts the rotary inv_freq, and so does the policy."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

bf16_policy = MixedPrecision(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.bfloat16,
    buffer_dtype=torch.bfloat16,
)
dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
model.to(torch.bfloat16)
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
    mixed_precision=bf16_policy,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=torch.device("cpu"),
    limit_all_gathers=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95), weight_decay=0.1)
for _ in range(4):
    ids = torch.randint(0, 256, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, inv_freq {model.module.model.rotary_emb.inv_freq.dtype}")
dist.destroy_process_group()
