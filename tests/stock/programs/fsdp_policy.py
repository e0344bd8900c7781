"""accelerate's FSDP2, configured in three ways; each rank prints the dtypes and a gradient.

accelerate applies FSDP on a GPU only, so the functions that it calls then (`set_mixed_precision`,
`fsdp2_prepare_model`) are called here. The mean gradient over two ranks, 0.5 + 2**-11, is 0.5 in BF16.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model

dist.init_process_group("gloo")
rank = dist.get_rank()


def trained(mode: str, policy: str | None, loaded: torch.dtype = torch.float32) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy=policy, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, mixed_precision=mode, fsdp_plugin=plugin)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)).to(loaded)
    seen = []
    model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    model = fsdp2_prepare_model(accelerator, model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((1, 16), 1.0 if rank == 0 else 2.0**-10)).float().sum().backward()
    weight = next(model.parameters())
    gradient = weight.grad.to_local().flatten()[0].item()
    optimizer.step()
    names = [str(dtype).removeprefix("torch.") for dtype in (seen[-1], weight.dtype)]
    return {"compute": names[0], "master": names[1], "gradient": gradient, "scaler": accelerator.scaler is not None}


found = {
    "fp16 policy": trained("bf16", "fp16"),
    "no policy": trained("bf16", None),
    "no mode": trained("no", "bf16", torch.bfloat16),
}
sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)  # S26
