"""FSDP1 without a mixed precision policy: the option --mixed_precision is parsed and never read."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--master_weight_type", default="fp32")
parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
dtype = torch.float32 if args.master_weight_type == "fp32" else torch.bfloat16
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
transformer = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(dtype)
transformer = FullyShardedDataParallel(
    transformer,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=torch.device("cpu"),
    limit_all_gathers=True,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)
for _ in range(4):
    latents = torch.randn(2, 8, 32)
    noise = torch.randn_like(latents)
    optimizer.zero_grad()
    loss = torch.mean((transformer(latents + noise).float() - (noise - latents)) ** 2)
    loss.backward()
    transformer.clip_grad_norm_(1.0)
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
