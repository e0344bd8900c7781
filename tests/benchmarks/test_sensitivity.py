"""The check of the ranking: its rounded layers, its outliers, and the committed result."""

from __future__ import annotations

import importlib.util
import json

import pytest
from paths import REPOSITORY

torch = pytest.importorskip("torch")

_SPEC = importlib.util.spec_from_file_location("benchmark_of_sensitivity", REPOSITORY / "benchmarks" / "sensitivity.py")
assert _SPEC is not None and _SPEC.loader is not None
sensitivity = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sensitivity)

RESULT = json.loads((REPOSITORY / "benchmarks" / "results" / "sensitivity.json").read_text())


def test_the_result_is_judged_by_its_rows() -> None:
    assert sensitivity.judged(RESULT["rows"]) == RESULT["judged"]
    judged = RESULT["judged"]["outliers"]
    assert {name: each["ranked"] for name, each in judged["models"].items()} == {
        "gpt": False, "llama": True, "post": True, "palm": True, "bert": False, "mixer": False
    }  # fmt: skip
    assert (judged["wins"], judged["pairs"]) == (15, 17)
    assert judged["p"] == pytest.approx(0.00117, abs=1e-5)


def test_the_sign_test() -> None:
    assert sensitivity.sign_test(5, 5) == 1 / 32
    assert sensitivity.sign_test(0, 4) == 1.0


@pytest.mark.parametrize("name", sensitivity.MODELS)
def test_outliers_change_nothing_without_rounding(name: str) -> None:
    layers = sensitivity.layers_of(name)
    window = torch.randint(256, (2, sensitivity.CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    plain = sensitivity.built(name, 0, [])(window)
    torch.testing.assert_close(sensitivity.built(name, 0, layers[:3])(window), plain, rtol=1e-4, atol=1e-5)


def test_a_rounded_layer_has_rounded_products() -> None:
    model = sensitivity.built("gpt", 0, [])
    window = torch.randint(256, (2, sensitivity.CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    exact = model(window)
    sensitivity.round_layers(model, set(sensitivity.layers_of("gpt")))
    loss = model(window)
    assert 0 < abs(float((loss - exact).detach())) < 0.5
    loss.backward()
    assert all(own.grad is not None and bool(own.grad.isfinite().all()) for own in model.parameters())
