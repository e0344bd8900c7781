"""Train a small mixture of experts under autocast, compiled or not, and print the dtypes that experts multiply."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from functorch.compile import make_boxed_compiler
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4}
torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)  # type: ignore[arg-type]
)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.arange(14).reshape(2, 7)
found: set[str] = set()


class Products(TorchDispatchMode):
    """Records the dtypes of grouped matmuls."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if "grouped_mm" in operation.name():
            found.update(str(each.dtype) for each in args[:2])
        return result


def compiler(graph: Any, _inputs: Any) -> Any:
    """Record the same for a graph that is compiled, and return the graph."""
    for node in graph.graph.nodes:
        if "grouped_mm" in str(node.target):
            found.update(str(each.meta["val"].dtype) for each in node.args[:2])
    return graph


compiled = "compiled" in sys.argv
if compiled:
    model.compile(backend=aot_autograd(fw_compiler=make_boxed_compiler(compiler)), fullgraph=True)
for _ in range(2):
    with contextlib.nullcontext() if compiled else Products(), torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps({"rank": 0, "experts": sorted(found), "loss": float(loss)}))
