"""Import libraries and compute small matmuls, one probe after the other: the program that `probes` runs as a child.

It imports nothing of mpguard, so that it runs next to any set of packages. Each probe prints a line when it starts and
a line of JSON when it ends; whatever is missing afterwards, the process crashed or hung in.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

#: Names of GPU kernels that are matmuls, and of those in FP8.
_PRODUCT = re.compile(r"gemm|nvjet|cutlass|gemv", re.IGNORECASE)
_FP8 = re.compile(r"e4m3|e5m2|nvjet_(sm\d+_)?[qr]{2}|fp8|float8|f8|mxf8|nvf4|e2m1", re.IGNORECASE)


def device() -> str:
    """Return the versions that torch itself reports, and the accelerator that it can use."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    cudnn: Any = torch.backends.cudnn
    facts["cudnn"] = cudnn.version()
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        facts["device"] = torch.cuda.get_device_name(0)
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        facts["nccl"] = ".".join(map(str, nccl.version()))
    if (kind := _accelerator()) is not None:
        module: Any = getattr(torch, kind, torch)
        facts["accelerator"] = kind
        facts["count"] = module.device_count() if hasattr(module, "device_count") else 1
        if hasattr(module, "get_device_name"):
            facts["device"] = module.get_device_name(0)
        torch.zeros(1, device=kind).add_(1).item()
    return json.dumps(facts)


def _accelerator() -> str | None:
    """Return torch's type of the accelerator, such as `cuda`, `mps`, `xpu`, `npu`; None if it can use none."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)  # from torch 2.6 on
    found = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    return None if found is None else str(found.type)


def product(kind: str) -> str:
    """Compute a matmul in a dtype, compare it with FP64, and return the kernel that computed it."""
    import torch

    where = _accelerator() or "cpu"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    if kind == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 128, generator=generator) for _ in range(2))
    left, right = a.to(where, dtype), b.to(where, dtype)
    found, kernel = _profiled(lambda: left @ right)
    exact = left.cpu().double() @ right.cpu().double()
    error = float((found.cpu().double() - exact).abs().max() / exact.abs().max())
    if not error < 0.02:
        raise RuntimeError(f"the matmul in {kind} differs by {error:.1%} from the one in FP64")
    return kernel or f"on the {where.upper()}"


def torchao(recipe: str) -> str:
    """Train a layer of torchao for a step; without a GPU in software."""
    import torch
    from torch import nn
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    where = "cuda" if torch.cuda.is_available() else "cpu"
    config = Float8LinearConfig.from_recipe_name(recipe)
    if where == "cpu":
        import dataclasses

        config = dataclasses.replace(config, emulate=True)
    model = nn.Sequential(nn.Linear(128, 128, bias=False)).to(where, torch.bfloat16)
    convert_to_float8_training(model, config=config)
    return _trained(model, where)


def te(recipe: str) -> str:
    """Train a layer of Transformer Engine for a step under a recipe."""
    import torch
    import transformer_engine.pytorch as engine
    from transformer_engine.common import recipe as recipes

    classes = {
        "delayed": "DelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling",
    }  # fmt: skip
    model = engine.Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    chosen = getattr(recipes, classes[recipe])()
    autocast = getattr(engine, "autocast", None)
    context = autocast(recipe=chosen) if autocast is not None else engine.fp8_autocast(fp8_recipe=chosen)

    def forward(x: Any) -> Any:
        with context:
            return model(x)

    return _trained(model, "cuda", forward)


def _trained(model: Any, where: str, forward: Callable[[Any], Any] | None = None) -> str:
    """Run forward and backward, check the values, and return an FP8 kernel that ran (on a CPU: `in software`)."""
    import torch

    x = torch.randn(128, 128, device=where, dtype=torch.bfloat16, requires_grad=True)

    def step() -> Any:
        output = (forward or model)(x)
        output.sum().backward()
        return output

    output, kernel = _profiled(step, _FP8)
    gradients = [parameter.grad for parameter in model.parameters()]
    if not all(bool(torch.isfinite(each.float()).all()) for each in (output, x.grad, *gradients)):
        raise RuntimeError("the output or a gradient is not finite")
    if where == "cuda" and not kernel:
        raise RuntimeError("no FP8 kernel ran: the matmul was computed in another format")
    return kernel or "in software"


def _profiled(function: Callable[[], Any], wanted: re.Pattern[str] = _PRODUCT) -> tuple[Any, str]:
    """Return a function's result, and the name of a GPU kernel that matches: of a matmul, if one does."""
    import torch

    if not torch.cuda.is_available():
        return function(), ""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = function()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if wanted.search(event.name)]
    products = [name for name in names if _PRODUCT.search(name)]
    return result, (products or names or [""])[0][:80]


def _import(module: str) -> str:
    return str(getattr(importlib.import_module(module), "__version__", ""))


_KINDS: dict[str, Callable[..., str]] = {
    "device": device,
    "import": _import,
    "product": product,
    "torchao": torchao,
    "te": te,
}


def main(names: list[str]) -> int:
    for name in names:
        kind, *arguments = name.split(":")
        print(f"START {name}", flush=True)
        try:
            result = {"ok": True, "detail": _KINDS[kind](*arguments)}
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            text = next((line for line in reversed(lines) if "undefined symbol" in line), lines[0])
            result = {"ok": False, "detail": f"{type(error).__name__}: {text}"[:400]}
        print(f"END {json.dumps({'name': name, **result})}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
