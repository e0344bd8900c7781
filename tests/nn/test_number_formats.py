"""The formats are those of torch's casts and of torchao, bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from mpguard.nn.number_formats import E2M1_MAX, FORMATS, e2m1, largest, rounded


def _normal(rows: int = 256, columns: int = 384) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def _outliers() -> torch.Tensor:
    """Columns and rows that are up to 10,000 times larger than the others, as in trained transformers."""
    found = _normal()
    found[:, 7] *= 1e4
    found[100] *= 300
    return found


def _wide() -> torch.Tensor:
    """Magnitudes over 24 decades, among them subnormal numbers of every format."""
    return _normal() * 10 ** torch.empty(256, 384).uniform_(-20, 4, generator=torch.Generator().manual_seed(1))


def _zeros() -> torch.Tensor:
    """Rows and blocks of zeros."""
    found = _normal()
    found[3] = 0
    found[:, 128:256] = 0
    return found


def _powers() -> torch.Tensor:
    """Exact powers of two, and the numbers next to them: where a scale is rounded the other way."""
    powers = 2.0 ** torch.arange(-20, 12).float()
    found = torch.stack([powers, powers.nextafter(torch.tensor(0.0)), -powers, powers * 1.75, powers * 448])
    return found.repeat(32, 12)


def _same() -> torch.Tensor:
    return torch.full((128, 128), -3.0)


TENSORS = [_normal, _outliers, _wide, _zeros, _powers, _same]

torchao = pytest.mark.parametrize("make", TENSORS, ids=lambda make: make.__name__.strip("_"))


@torchao
def test_bf16_is_the_cast_of_torch(make: Callable[[], torch.Tensor]) -> None:
    assert torch.equal(rounded(make(), "bf16").values, make().bfloat16().float())


@torchao
@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
def test_tensorwise_is_that_of_torchao(make: Callable[[], torch.Tensor], role: str) -> None:
    utils = pytest.importorskip("torchao.float8.float8_utils")
    tensor = make()
    dtype = torch.float8_e5m2 if role == "gradient" else torch.float8_e4m3fn
    scale = utils.tensor_to_scale(tensor, dtype)
    expected = utils.to_fp8_saturated(tensor * scale, dtype).float() / scale
    assert torch.equal(rounded(tensor, "tensorwise", role).values, expected)


@torchao
def test_rowwise_is_that_of_torchao(make: Callable[[], torch.Tensor]) -> None:
    utils = pytest.importorskip("torchao.float8.float8_utils")
    config = pytest.importorskip("torchao.float8.config")
    tensor = make()
    scale = utils.tensor_to_scale(
        tensor,
        torch.float8_e4m3fn,
        scaling_granularity=config.ScalingGranularity.AXISWISE,
        axiswise_dim=1,
        round_scales_to_power_of_2=config.Float8LinearConfig.from_recipe_name("rowwise").round_scales_to_power_of_2,
    )
    expected = utils.to_fp8_saturated(tensor * scale, torch.float8_e4m3fn).float() / scale
    assert torch.equal(rounded(tensor, "rowwise").values, expected)


@pytest.fixture
def blockwise_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchao's reference in plain torch. Its module imports Triton, which does not exist for every platform."""
    pytest.importorskip("torchao")
    for name in ("triton", "triton.language") if importlib.util.find_spec("triton") is None else ():
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    name = "torchao.prototype.blockwise_fp8_training.kernels"
    kernels = importlib.import_module(name)
    yield kernels
    sys.modules.pop(name)


@torchao
@pytest.mark.parametrize("role", ["input", "weight"])
def test_blockwise_is_that_of_torchao(make: Callable[[], torch.Tensor], role: str, blockwise_kernels: Any) -> None:
    tensor = make()
    tensor = tensor[: tensor.shape[0] // 128 * 128]
    weight, act = (f"torch_blockwise_scale_{name}" for name in ("weight_quant", "act_quant_lhs"))
    quantize = getattr(blockwise_kernels, weight if role == "weight" else act)
    data, inverse = quantize(tensor)
    height = 128 if role == "weight" else 1
    scale = inverse.repeat_interleave(height, 0).repeat_interleave(128, 1)
    assert torch.equal(rounded(tensor, "blockwise", role).values, data.float() * scale)


@torchao
def test_mxfp8_is_that_of_torchao(make: Callable[[], torch.Tensor]) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    tensor = make()
    scale, data = mx.to_mx(tensor, torch.float8_e4m3fn, 32, config.ScaleCalculationMode.RCEIL)
    expected = mx.to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.float32)
    assert torch.equal(rounded(tensor, "mxfp8").values, expected)


@torchao
def test_nvfp4_is_that_of_torchao(make: Callable[[], torch.Tensor]) -> None:
    fp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    tensor = make()
    of_tensor = fp4.per_tensor_amax_to_scale(tensor.abs().max())
    scales, packed = fp4.nvfp4_quantize(tensor, 16, of_tensor)
    values = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(packed)).view(tensor.shape[0], -1, 16)
    expected = values * (scales.float().view(tensor.shape[0], -1) * of_tensor).unsqueeze(-1)
    assert torch.equal(rounded(tensor, "nvfp4").values, expected.flatten(1))


def test_e2m1_rounds_ties_to_even() -> None:
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(e2m1(numbers), numbers)
    between = (numbers[:-1] + numbers[1:]) / 2
    assert e2m1(between).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert torch.equal(e2m1(-between), -e2m1(between))
    assert float(e2m1(torch.tensor(E2M1_MAX))) == E2M1_MAX


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_need_not_fit_the_blocks(name: str) -> None:
    tensor = _normal(37, 53)
    for role in ("input", "weight", "gradient"):
        found = rounded(tensor, name, role)
        assert found.values.shape == tensor.shape
        noise = (found.values - tensor).square().sum() / tensor.square().sum()
        assert noise < (0.02 if name == "nvfp4" else 0.004)


def test_underflow_and_saturation_are_counted() -> None:
    tensor = torch.tensor([[1e6, 1.0, 0.0, 1e-3]])
    found = rounded(tensor, "tensorwise")
    assert found.values.tolist() == [[1e6, 0.0, 0.0, 0.0]]
    assert (int(found.underflow), int(found.saturated)) == (2, 0), "a zero that was zero has not underflowed"
    clipped = rounded(tensor, "tensorwise", of_tensor=torch.tensor(1e5))
    assert int(clipped.saturated) == 1
    assert float(clipped.values[0, 0]) == pytest.approx(1e5)
    assert int(rounded(tensor, "mxfp8").saturated) == 0, "its scale is rounded up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_value_is_that_of_abs(dtype: torch.dtype) -> None:
    tensor = (_outliers() / 1e4).to(dtype)
    assert torch.equal(largest(tensor), tensor.abs().max().float())
    assert torch.equal(largest(tensor, 1), tensor.abs().amax(1, keepdim=True).float())
    assert torch.equal(largest(tensor, 0), tensor.abs().amax(0, keepdim=True).float())
