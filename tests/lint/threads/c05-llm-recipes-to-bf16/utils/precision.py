import torch
from torch.distributed.fsdp import MixedPrecision

bf16_policy = MixedPrecision(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.bfloat16,
    buffer_dtype=torch.bfloat16,
)


def preserve_fp32_dtype(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():
        if "fp32" in name:
            param.data = param.data.float()
