"""What it costs that FP8 layers round their weights in every forward pass, and what shows that a weight has changed.

    python benchmarks/weight_casts.py --output benchmarks/results/weight_casts.json      # no GPU, a minute

Under gradient accumulation the weights of one optimizer step are rounded once per micro-batch. `traffic` counts how
often compiled code of a converted layer reads and writes a weight for that: in the graphs that inductor gets, after the
partition into forward and backward. `changes` lists ways in which programs change weights, and by what a kept FP8 copy
could notice: another parameter, its version counter, its address. A copy that does not notice is wrong without a word.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_compiler
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from workers import versions

import mpguard

SHAPE = (48, 80)
POLICY = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)


def traffic(dtype: torch.dtype) -> dict[str, Any]:
    """Return the passes over a weight in one forward and backward pass, and their bytes per element."""
    found = {"maxima": 0, "casts": 0}

    def compiler(graph: Any, _inputs: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            read = node.args[0].meta["val"] if node.args and hasattr(node.args[0], "meta") else None
            if str(node.target).startswith(("aten.amax", "aten.max")) and sorted(read.shape) == sorted(SHAPE):
                found["maxima"] += 1
            if isinstance(value, torch.Tensor) and value.dtype is torch.float8_e4m3fn and "convert" in str(node.target):
                found["casts"] += sorted(value.shape) == sorted(SHAPE)
        return graph

    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
    mpguard.convert(layer, POLICY)
    boxed = make_boxed_compiler(compiler)
    backend = aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compiled = torch.compile(layer, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(32, SHAPE[1], requires_grad=True)).sum().backward()
    reads = found["maxima"] + found["casts"]
    return {**found, "bytes_per_element": reads * dtype.itemsize + found["casts"]}


def _step(**options: Any) -> Callable[[nn.Module], Any]:
    def change(layer: nn.Module) -> None:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        layer(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    return change


def _in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)


def _ones(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(value) for name, value in layer.state_dict().items()}


#: Ways to change the weights of a layer.
WAYS: dict[str, Callable[[Any], Any]] = {
    "AdamW": _step(),
    "AdamW(foreach=True)": _step(foreach=True),
    "AdamW(fused=True)": _step(fused=True),
    "load_state_dict": lambda layer: layer.load_state_dict(_ones(layer)),
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(_ones(layer), assign=True),
    "no_grad, in place": _in_place,
    "state_dict()[name].fill_": lambda layer: layer.state_dict()["weight"].fill_(1),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.ones(16, 16)),
    "data.clamp_": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "data = tensor": lambda layer: setattr(layer.weight, "data", torch.ones(16, 16)),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.ones(272), layer.parameters()),
}


def noticed(change: Callable[[Any], Any]) -> dict[str, bool]:
    """Return what shows a change of a weight."""
    layer = nn.Linear(16, 16)

    def shown() -> dict[str, int]:
        weight = layer.weight
        return {"parameter": id(weight), "version": weight._version, "address": weight.data_ptr()}

    kept, value, before = layer.weight, layer.weight.detach().clone(), shown()
    change(layer)
    assert not torch.equal(layer.weight.detach(), value) and kept is not None
    return {name: number != before[name] for name, number in shown().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    options = parser.parse_args()
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": versions(("torch", "torchao", "mpguard")),
        "traffic": {name: traffic(getattr(torch, name)) for name in ("float32", "bfloat16")},
        "changes": {name: noticed(change) for name, change in WAYS.items()},
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
