"""What a format costs a layer is that of the matmuls of the rounded operands."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from mpguard.nn import layer_error
from mpguard.nn.number_formats import FORMATS, rounded


def _decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    return 10 * math.log10(float(exact.square().sum() / (found - exact).square().sum()))


def _made(rows: int, size: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, size), torch.randn(outputs, size) * 0.02, torch.randn(rows, outputs) * 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_the_products_of_a_whole_layer(name: str) -> None:
    inputs, weight, gradient = _made(256, 128, 192)
    kept = layer_error.keep(inputs)
    output = layer_error.output_errors(kept, weight, [name])[name]
    found = rounded(inputs, name).values @ rounded(weight, name, "weight").values.t()
    assert output.snr == pytest.approx(_decibels(inputs @ weight.t(), found), abs=1e-3)
    assert output.operands["input"].snr == pytest.approx(_decibels(inputs, rounded(inputs, name).values), abs=1e-3)

    learned = layer_error.weight_gradient_errors(kept, gradient, [name], trained=True)[name]
    left, right = rounded(gradient.t(), name, "gradient").values, rounded(inputs.t(), name).values
    assert learned.snr == pytest.approx(_decibels(gradient.t() @ inputs, left @ right.t()), abs=1e-3)
    frozen = layer_error.weight_gradient_errors(kept, gradient, [name], trained=False)[name]
    assert frozen.snr is None
    assert list(frozen.operands) == ["gradient"]
    assert frozen.operands["gradient"] == learned.operands["gradient"]


def test_rounding_alone_costs_what_the_docs_say() -> None:
    """The numbers that the default bound is based on: values without outliers."""
    inputs, weight, gradient = _made(2048, 256, 256)
    kept = layer_error.keep(inputs)
    output = layer_error.output_errors(kept, weight, FORMATS)
    learned = layer_error.weight_gradient_errors(kept, gradient, FORMATS, trained=True)
    expected = {"bf16": (52.6, 52.6), "tensorwise": (28.5, 24.6), "rowwise": (28.5, 28.5), "blockwise": (28.7, 28.8),
                "mxfp8": (28.5, 28.5), "nvfp4": (17.4, 17.4)}  # fmt: skip
    found = {name: (output[name].snr, learned[name].snr) for name in FORMATS}
    assert found == {name: pytest.approx(each, abs=0.3) for name, each in expected.items()}


def test_an_outlier_costs_a_scale_per_tensor_more_than_one_per_block() -> None:
    inputs, weight, _ = _made(256, 256, 128)
    inputs[:, 3] *= 3e5
    errors = layer_error.output_errors(layer_error.keep(inputs), weight, FORMATS)
    assert errors["tensorwise"].operands["input"].underflow > 0.5
    assert errors["mxfp8"].operands["input"].underflow < 0.2


def test_rows_are_bounded_and_scales_are_of_the_whole_tensor() -> None:
    inputs = torch.randn(layer_error.ROWS * 3 + 77, 8)
    inputs[-1, 2] = 1e6  # in no group of rows that is kept
    kept = layer_error.keep(inputs)
    assert kept.rows.shape[0] <= layer_error.ROWS
    assert float(kept.of_tensor) == 1e6
    assert kept.of_columns.argmax() == 2
    assert kept.count == inputs.shape[0]
    groups = layer_error.sampled(torch.arange(inputs.shape[0]).unsqueeze(1), layer_error.ROWS).view(-1, 128)
    assert torch.equal(groups[:, -1] - groups[:, 0], torch.full((len(groups),), 127)), "groups are whole"
    assert int(groups[-1, 0]) > inputs.shape[0] * 0.9, "they are spread over the tensor"


def test_zeros_and_infinities_have_no_ratio() -> None:
    zeros = layer_error.output_errors(layer_error.keep(torch.zeros(32, 32)), torch.randn(32, 32), FORMATS)
    assert {each.snr for each in zeros.values()} == {None}
    inputs = torch.ones(32, 32)
    inputs[0, 0] = math.inf
    infinite = layer_error.output_errors(layer_error.keep(inputs), torch.randn(32, 32), FORMATS)
    assert {each.snr for each in infinite.values()} == {None}


def test_what_a_format_holds_exactly_has_the_largest_ratio() -> None:
    ones = torch.ones(32, 32)
    assert layer_error.output_errors(layer_error.keep(ones), ones, ["bf16"])["bf16"].snr == layer_error.EXACT
