"""MXFP8 by torchao, emulated: the layer that `convert` takes computes what MXFP8 is, with its bias, in every dtype."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

pytest.importorskip("torchao", reason="the real library runs here")

import torch
from processes import in_fork, proof, run_python, transcript
from torch import nn

import mpguard
from mpguard.core.errors import PolicyError
from mpguard.nn.fp8.torchao_mxfp8 import TorchaoMXFP8Linear
from mpguard.policy import hardware

POLICY = mpguard.recipe("blackwell_bf16_with_mxfp8_mixed").replace(fp8_emulate=True, compile=False)

#: The largest relative error of a matmul of normal numbers in E4M3 with 3 bits: about 2**-4 for each factor, random.
ERROR = 0.06


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error of a tensor in the Frobenius norm."""
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


def in_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """Round values to MXFP8 along the last dimension: E4M3 with the smallest power of two that overflows no value."""
    blocks = values.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(torch.float8_e4m3fn).max)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_converted_layer_multiplies_in_mxfp8_forward_and_backward(bias: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=bias))
    plain = copy.deepcopy(model)
    report = mpguard.convert(model, POLICY)
    assert report.converted == ("0",) and type(model[0]) is TorchaoMXFP8Linear
    results = []
    for each in (model, plain):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = each(inputs)
        assert output.dtype is (torch.bfloat16 if autocast else torch.float32)
        output.float().square().mean().backward()
        results.append((output, inputs.grad, each[0].weight.grad))
        assert each[0].weight.grad.dtype is torch.float32 and (not bias or each[0].bias.grad is not None)
    for found, exact in zip(*results, strict=True):
        assert 0.005 < error(found, exact) < ERROR, "rounded to three bits, and not more"


def test_the_forward_pass_is_that_of_the_format() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(64, 32)), torch.randn(32, 64)
    expected = in_mxfp8(inputs) @ in_mxfp8(model[0].weight.detach()).T + model[0].bias.detach()
    mpguard.convert(model, POLICY)
    assert error(model(inputs), expected) < 1e-6


@pytest.mark.parametrize("rows", [1, 31, 40])
def test_rows_that_are_no_multiple_of_32_are_padded(rows: int) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    mpguard.convert(model, POLICY)
    with pytest.warns(mpguard.MpguardWarning, match=f"has {rows} rows, FP8 matmuls need a multiple of 32"):
        output = model(torch.randn(rows, 64))
    assert output.shape == (rows, 32)
    output.sum().backward()


def test_what_has_no_mxfp8_stays_as_it_is_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 64))
    report = mpguard.convert(model, POLICY)
    assert report.converted == ("0",)
    assert dict(report.skipped) == {"1": "48 is not a multiple of 32", "2": "48 is not a multiple of 32"}
    mpguard.revert(model)
    assert type(model[0]) is nn.Linear and "kernel_preference" not in vars(model[0])


def test_it_trains_as_in_bf16() -> None:
    losses, first = [], 0.0
    for convert in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        if convert:
            mpguard.convert(model, POLICY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs = torch.randn(64, 32)
        for step in range(60):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(inputs).float() - inputs.flip(-1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = loss.item() if step == 0 else first
        losses.append(loss.item())
    assert max(losses) < 0.01 * first, (first, losses)


def test_which_library_and_what_is_refused() -> None:
    both = hardware.Hardware("B200", (10, 0), 1, (13, 0), {"te": "2.20", "torchao": "0.18", "triton": "3"})
    only = hardware.Hardware("B200", (10, 0), 1, (13, 0), {"torchao": "0.18", "triton": "3"})
    plain = mpguard.recipe("blackwell_bf16_with_mxfp8_mixed")
    assert hardware.backend_of(plain, both) == "te" and hardware.backend_of(plain, only) == "torchao"
    assert hardware.backend_of(plain.replace(backend="torchao"), both) == "torchao"
    assert hardware.backend_of(POLICY, both) == "torchao", "only torchao emulates"
    assert only.refuses(plain) is None
    for other in (plain.replace(fp8="hybrid"), plain.replace(bf16=False, fp16=True)):
        assert "torchao has MXFP8 in E4M3 and with BF16 compute only" in (only.refuses(other) or "")
    with pytest.raises(PolicyError, match="drops the bias of every Linear"):
        plain.replace(backend="torchao").to("torchao")


COMPILED = """
import torch, mpguard
from torch import nn
policy = mpguard.recipe("blackwell_bf16_with_mxfp8_mixed").replace(fp8_emulate=True, compile=False)
mpguard.activate(policy.replace(compile="auto"), proof_json="proof.json")
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 48))
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = compiled(torch.randn(32, 32)).float().square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_compiled_layers_are_seen_in_the_proof(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(COMPILED)
    ended = in_fork([tmp_path / "t.py"], cwd=tmp_path, program=run_python)
    assert ended.returncode == 0, transcript(ended)
    rows = proof(tmp_path / "proof.json")["rows"]
    assert rows["fp8"]["found"] == "2 of 3 Linear (torchao mxfp8, emulated)"
    assert rows["fp8 products"]["found"] == "67 % of the matmuls", "of 9,216 multiply-adds per row 6,144 are in FP8"
