"""FSDP2: each block, then the root, under one policy that reduces in FP32."""

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def train(model, loader):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in loader:
        loss = model(batch).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
