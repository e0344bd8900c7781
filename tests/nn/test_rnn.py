"""The kernel of RNNs under autocast, through torch's dispatcher. With cuDNN: tests/gpu/test_stock_gpu.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
from limits import seconds

pytest.importorskip("torch", reason="the real library runs here")

#: cuDNN is not here: the operator gets a kernel for the CPU, and mpguard's kernel the autocast of the CPU.
PROGRAM = """
import torch
from torch import library as torch_library
from mpguard.nn import rnn

seen = []


def cudnn(input, weight, stride, buffer, hx, cx, *more):
    given = (input, *weight, hx, *([] if cx is None else [cx]))
    seen.append((buffer is None, {each.dtype for each in given}, torch.is_autocast_enabled("cpu")))
    return input @ weight[0].T + hx[0], hx.clone(), torch.empty(0), torch.empty(0), torch.empty(0)


library = torch_library.Library("aten", "IMPL")
library.impl("_cudnn_rnn", cudnn, "CPU")
assert rnn.register("AutocastCPU") is None and rnn.register("AutocastCPU") is None and len(rnn._libraries) == 1
weights = [torch.randn(4, 4) for _ in range(4)]
x, hx = torch.randn(3, 2, 4), torch.randn(1, 2, 4)
more = (2, 4, 0, 1, False, 0.0, True, False, [], None)
for dtype in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", dtype):
        output = torch._cudnn_rnn(x, weights, 4, torch.randn(8), hx, torch.randn(1, 2, 4), *more)[0]
        assert torch.is_autocast_enabled("cpu")
    assert output.dtype is dtype and seen.pop() == (True, {dtype}, False)
with torch.autocast("cpu", torch.bfloat16):
    torch._cudnn_rnn(x.double(), [each.double() for each in weights], 4, None, hx.double(), None, *more)
assert seen.pop()[1] == {torch.float64}
torch._cudnn_rnn(x, weights, 4, torch.randn(8), hx, None, *more)
assert seen.pop() == (False, {torch.float32}, False), "without autocast nothing changes"
"""


def test_rnns_compute_in_the_dtype_of_autocast() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True,
                          timeout=seconds(120))  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_operator_with_other_arguments_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpguard.nn import rnn

    monkeypatch.setattr(rnn, "OPERATOR", "mm")
    registered = list(rnn._libraries)  # an earlier test of this process may have activated a policy
    assert rnn.register("AutocastCPU") == "aten::mm has other arguments in the installed version"
    assert rnn._libraries == registered
