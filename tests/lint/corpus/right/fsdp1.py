"""FSDP1 in BF16, and in FP16 with the scaler that reduces over ranks."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

bf16_policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
fp16_policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)


def train_bf16(model, loader):
    model = FSDP(model, mixed_precision=bf16_policy, device_id=torch.cuda.current_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_fp16(model, loader):
    model = FSDP(model, mixed_precision=fp16_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = ShardedGradScaler()
    for batch in loader:
        loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
