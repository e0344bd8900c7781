"""FP8 weights gathered in FP8: only under FSDP2, and the scales are computed for all parameters at once."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)


def train(model, loader):
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, fqn: "output" not in fqn)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for tokens, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
