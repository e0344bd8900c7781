"""What FP8 libraries refuse, and what some combinations cost, on a real GPU: the facts behind rules MPG402 to MPG417.

    python benchmarks/fp8_limits.py --output benchmarks/results/fp8_limits.json

Each check is tried and its outcome recorded: what it returned, or the error. Needs one Hopper GPU, Transformer
Engine and torchao.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARIES = ("torch", "torchao", "transformer-engine")
CHECKS: dict[str, Callable[[], Any]] = {}
BLOCKS, WIDTH, HIDDEN, TOKENS = 6, 4096, 14336, (2, 4096)


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS[name] = function
        return function

    return register


def recipes() -> dict[str, Any]:
    from transformer_engine.common import recipe

    return {
        "delayed": recipe.DelayedScaling(),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }


# -- MPG402: DelayedScaling inside a compiled function. First, since a check of the hardware is remembered ------------


def compiled(recipe: str, fullgraph: bool) -> str:
    import transformer_engine.pytorch as te

    chosen, layer = recipes()[recipe], te.Linear(64, 64, params_dtype=torch.bfloat16).cuda()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=chosen):
            return layer(x)

    torch._dynamo.utils.counters.clear()
    torch.compile(inside, fullgraph=fullgraph)(
        torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    ).sum().backward()
    frames = torch._dynamo.utils.counters["frames"]
    return f"ran; {frames['ok']} of {frames['total']} frames compiled"


for _recipe in ("delayed", "current"):
    for _full in (False, True):
        check(f"compile/{_recipe}, fullgraph={_full}")(lambda r=_recipe, f=_full: compiled(r, f))
check("compile/delayed, fullgraph=False, once more")(lambda: compiled("delayed", False))


# -- MPG403: float8 as the dtype of parameters ------------------------------------------------------------------------


@check("params/te.Linear, params_dtype=float8_e4m3fn")
def _params() -> str:
    import transformer_engine.pytorch as te

    return str(te.Linear(64, 64, params_dtype=torch.float8_e4m3fn).cuda().weight.dtype)


@check("params/nn.Linear in float8_e4m3fn under autocast, then AdamW")
def _adamw() -> str:
    model = nn.Linear(64, 64).cuda().to(torch.float8_e4m3fn)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    return "stepped"


# -- MPG404: sizes ----------------------------------------------------------------------------------------------------


def te_sizes(recipe: str, sizes: tuple[int, int, int], train: bool) -> str:
    import transformer_engine.pytorch as te

    layer = te.Linear(sizes[0], sizes[1], params_dtype=torch.bfloat16).cuda()
    with te.autocast(recipe=recipes()[recipe]):
        out = layer(torch.randn(sizes[2], sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True))
    if train:
        out.float().sum().backward()
    torch.cuda.synchronize()
    return "ran"


def torchao_sizes(recipe: str, sizes: tuple[int, int, int]) -> str:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(sizes[0], sizes[1])).cuda().bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    x = torch.randn(sizes[2], sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).float().sum().backward()
    torch.cuda.synchronize()
    return "ran"


SIZES = ((64, 64, 16), (64, 64, 8), (64, 64, 12), (64, 64, 24), (72, 64, 16), (64, 72, 16), (64, 10, 16), (48, 48, 16))
for _sizes in SIZES:
    _name = "in={} out={} rows={}".format(*_sizes)
    for _recipe in ("delayed", "current", "block"):
        for _train in (False, True):
            _what = "trained" if _train else "forward"
            check(f"sizes/te {_recipe}, {_name}, {_what}")(lambda r=_recipe, s=_sizes, t=_train: te_sizes(r, s, t))
    for _recipe in ("tensorwise", "rowwise"):
        check(f"sizes/torchao {_recipe}, {_name}, trained")(lambda r=_recipe, s=_sizes: torchao_sizes(r, s))


# -- backward inside the region ----------------------------------------------------------------------------------------


def losses(recipe: str, inside: bool) -> list[float]:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer, chosen, found = te.Linear(64, 64).cuda(), recipes()[recipe], []
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    for _ in range(6):
        x = torch.randn(16, 64, device="cuda")
        with te.autocast(recipe=chosen):
            loss = layer(x).pow(2).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(round(loss.item(), 4))
    return found


for _recipe in ("delayed", "current"):
    for _inside in (False, True):
        check(f"backward/{_recipe}, {'inside' if _inside else 'outside'}")(lambda r=_recipe, i=_inside: losses(r, i))


# -- MPG413, MPG417: float8 all-gather without FSDP2 ------------------------------------------------------------------


def all_gather(optimizer_first: bool, all_gather: bool = True) -> dict[str, Any]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(64, 64)).cuda().bfloat16()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before, 0.1)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather))
    if not optimizer_first:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    old = [p.detach().float().clone() for p in model.parameters()]
    model(torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)).float().pow(2).sum().backward()
    optimizer.step()
    changed = [not torch.equal(o, p.detach().float()) for o, p in zip(old, model.parameters(), strict=True)]
    return {"weight trained": changed[0], "bias trained": changed[1], "saved": _saved(model)}


def _saved(model: nn.Module) -> str:
    from safetensors.torch import save

    try:
        save(model.state_dict())
    except RuntimeError as error:
        return str(error)
    return "by safetensors"


check("all-gather/optimizer before the conversion")(lambda: all_gather(True))
check("all-gather/optimizer after the conversion")(lambda: all_gather(False))
check("all-gather/off, optimizer before the conversion")(lambda: all_gather(True, all_gather=False))


# -- with DDP, FSDP2, checkpointing, compile --------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, 128).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(nn.functional.silu(self.up(self.after(x))))


def ddp(order: str, recipe: str) -> str:
    from torch.nn.parallel import DistributedDataParallel
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model: nn.Module = nn.Sequential(Block(512, 1024), Block(512, 1024)).cuda()
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if order == "compiled, then wrapped":
        model = DistributedDataParallel(torch.compile(model))
    else:
        model = torch.compile(DistributedDataParallel(model))
    optimizer = torch.optim.AdamW(model.parameters())
    old = [p.detach().clone() for p in model.parameters()]
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(2, 128, 512, device="cuda")).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = sum(not torch.equal(o, p) for o, p in zip(old, model.parameters(), strict=True))
    return f"{changed} of {len(old)} parameters trained"


def step_time(fp8: str, checkpointed: bool, compiled: bool) -> dict[str, Any]:
    """Return the milliseconds of one step under FSDP2 on one GPU: the median of 15, after 5."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    model = nn.Sequential(*(Block(WIDTH, HIDDEN) for _ in range(BLOCKS))).cuda()
    if fp8 == "tensorwise, float8 all-gather":
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    elif fp8:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(fp8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for place, block in enumerate(model):
        kept = checkpoint_wrapper(block, preserve_rng_state=False) if checkpointed else block
        model[place] = torch.compile(kept) if compiled else kept
        fully_shard(model[place], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x, times = torch.randn(*TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "all-gather" in fp8:
            precompute_float8_dynamic_scale_for_fsdp(model)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": round(sorted(times[5:])[7], 1), "GiB": round(peak, 1)}


for _order in ("compiled, then wrapped", "wrapped, then compiled"):
    for _recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        check(f"ddp, one process/{_order}, {_recipe}")(lambda o=_order, r=_recipe: ddp(o, r))
for _compiled in (True, False):
    for _kept in (False, True):
        for _fp8 in ("", "tensorwise, float8 all-gather", "rowwise"):
            _name = f"compile={_compiled}, checkpointing={_kept}, {_fp8 or 'bf16'}"
            check(f"fsdp2, one process/{_name}")(lambda f=_fp8, k=_kept, c=_compiled: step_time(f, k, c))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29561"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("nccl")
    found: dict[str, Any] = {}
    for name, function in CHECKS.items():
        try:
            found[name] = function()
        except Exception as error:  # any error of a library is a result
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(name, found[name], flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    result = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "model": {"blocks": BLOCKS, "width": WIDTH, "hidden": HIDDEN, "tokens": list(TOKENS)},
        "checks": found,
    }
    Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
