"""The report: how ratios of steps are put together, the order of layers, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sensitivity_lines import FORMATS, layer, layers

from mpguard.numerics.layers import EXACT
from mpguard.numerics.report import Sensitivity, gathered, read_lines


def report(*lines: object, recipe: str = "tensorwise") -> Sensitivity:
    return gathered(list(lines), recipe, FORMATS)  # type: ignore[arg-type]


def test_the_ratio_of_no_error_is_one_number() -> None:
    layer_error = pytest.importorskip("mpguard.nn.layer_error")
    assert EXACT == layer_error.EXACT


def test_the_layer_that_loses_most_is_first() -> None:
    found = report(
        layers("a", "b", "c"), layer("a"), layer("b", tensorwise=(30.0, 12.0)), layer("c", tensorwise=(14.0, 30.0))
    )
    assert [each.name for each in found.measured] == ["b", "c", "a"]
    b, c, _ = found.measured
    assert (b.snr("tensorwise"), b.worst("tensorwise")) == (12.0, "weight gradient")
    assert (c.snr("tensorwise"), c.worst("tensorwise")) == (14.0, "output")
    assert b.snr("rowwise_with_gw_hp") == 28.5, "output in rowwise, weight gradient in BF16"


def test_ratios_of_steps_are_those_of_the_mean_noise() -> None:
    found = report(layers("a"), layer("a", 2, tensorwise=10.0), layer("a", 3, rank=1, tensorwise=20.0))
    own = found.measured[0]
    assert own.snr("tensorwise") == pytest.approx(12.6, abs=0.01)  # -10 log10((0.1 + 0.01) / 2)
    assert own.drift("tensorwise") == pytest.approx(10.0)
    assert own.shares("tensorwise", "underflow") == {"input": 0.0, "weight": 0.0, "gradient": 0.25}
    assert found.steps == 2


def test_a_ratio_that_is_not_known_does_not_count() -> None:
    found = report(layers("a", "b"), layer("a", tensorwise=(25.0, None)), layer("b", tensorwise=(None, None)))
    assert [each.name for each in found.measured] == ["a"]
    assert found.measured[0].snr("tensorwise") == 25.0
    assert found.as_json()["unmeasured"] == [{"layer": "b", "reason": "had no finite gradient"}]


def test_json_has_everything() -> None:
    found = report(
        layers("a", "q", left_out={"a": "fp8_exclude"}, unmeasured={"q": "is quantized"}),
        layer("a", nvfp4=3.0),
        {"event": "end", "seconds": 1.5, "total": 3.0},
    ).as_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["overhead"] == {"seconds": 1.5, "total": 3.0}
    assert found["unmeasured"] == [{"layer": "q", "reason": "is quantized"}]
    own = found["layers"][0]
    assert (own["layer"], own["left_out"], own["share"]) == ("a", "fp8_exclude", 0.0)
    assert own["formats"]["nvfp4"]["snr"] == pytest.approx(3.0)
    assert own["formats"]["tensorwise"]["underflow"] == {"input": 0.0, "weight": 0.0, "gradient": 0.25}
    assert own["steps"] == [
        {"step": 2, "rank": 0}
        | {
            product: {form: pytest.approx(own["formats"][form][product]) for form in FORMATS}
            for product in ("output", "weight_gradient")
        }
    ]


def test_lines_of_all_ranks_are_read_and_a_line_that_is_cut_off_is_not(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(layers("a")) + "\n" + json.dumps(layer("a", 2)) + "\n")
    (tmp_path / "rank-1.jsonl").write_text(json.dumps(layer("a", 3, rank=1)) + "\n" + '{"event": "lay')
    found = report(*read_lines(tmp_path))
    assert [(each.step, each.rank) for each in found.measured[0].steps] == [(2, 0), (3, 1)]
