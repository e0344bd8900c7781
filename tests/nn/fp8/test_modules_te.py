"""A recipe per module with Transformer Engine's layers: each is built with, and enters, the recipe of its pattern.

Transformer Engine needs a GPU (tests/gpu/test_fp8_modules_gpu.py). Here mpguard's own code runs with a stand-in of its
public names: `Linear`, `autocast`, the recipes, and the state that `autocast` sets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

import mpguard
from mpguard.policy import hardware
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import fp8
from mpguard.runtime.proof.checks import compare
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Verdict
from mpguard.targets.plugin import get


@dataclasses.dataclass
class Recipe:
    fp8_format: Any = None
    margin: int = 0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def delayed(self) -> bool:
        return type(self).__name__ == "DelayedScaling"


class State:
    recipe: Any = None
    quantization_state = types.SimpleNamespace(is_first_fp8_module=False)

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None


@contextlib.contextmanager
def autocast(recipe: Any) -> Iterator[None]:
    before, State.recipe = State.recipe, recipe
    yield
    State.recipe = before


class Linear(nn.Module):
    """As `transformer_engine.pytorch.Linear`: a forward pass notes the recipe of the autocast around it."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(self, features_in: int, features_out: int, *, bias: bool, params_dtype: Any, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(features_out, device=device)) if bias else None
        self.fp8_meta: dict[str, Any] = {}
        self.fp8 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.fp8, self.fp8_meta["recipe"] = State.recipe is not None, State.recipe
        return nn.functional.linear(input, self.weight, self.bias)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    classes = {name: type(name, (Recipe,), {}) for name in names}
    formats = {name: types.SimpleNamespace(name=name) for name in ("HYBRID", "E4M3")}
    modules: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {**classes, "Format": formats},
        "transformer_engine.pytorch": {"Linear": Linear, "autocast": autocast},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": State},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.float8_tensor": {"Float8Quantizer": object},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[last] = module
    monkeypatch.delitem(sys.modules, "mpguard.nn.fp8.te", raising=False)
    monkeypatch.setattr(get("te"), "require", lambda: None)
    here = hardware.Hardware("B200", (10, 0), 1, (13, 0), {"te": "2.20"})
    monkeypatch.setattr(hardware, "detect", lambda: here)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    yield
    sys.modules.pop("mpguard.nn.fp8.te", None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.last = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.up(x) * self.gate(x)))  # type: ignore[no-any-return]


def policy(base: str = "tensorwise", **recipes: str) -> mpguard.Policy:
    entries = [{"pattern": name, "recipe": recipe} for name, recipe in recipes.items()]
    plain: dict[str, Any] = {"bf16": True, "fp8": "hybrid", "backend": "te", "compile": False, "fp8_recipe": base}
    return mpguard.Policy(**plain, fp8_modules=entries)


@pytest.mark.usefixtures("transformer_engine")
def test_each_layer_enters_its_own_recipe_inside_of_another_autocast_too() -> None:
    model, asked = Block(), policy(up="blockwise", gate="mxfp8", last="none")
    report = mpguard.convert(model, asked)
    assert str(report).startswith("3 of 4 Linear layers in FP8 (te 1 tensorwise, 1 blockwise, 1 mxfp8)")
    other = sys.modules["transformer_engine.common.recipe"].DelayedScaling()
    for around in (contextlib.nullcontext(), autocast(other)):
        with around:
            assert model(torch.randn(32, 64)).shape == (32, 64)
        kinds = {
            name: type(vars(model._modules[name])["fp8_meta"]["recipe"]).__name__ for name in ("up", "gate", "down")
        }
        assert kinds == {"up": "Float8BlockScaling", "gate": "MXFP8BlockScaling", "down": "Float8CurrentScaling"}
        seen = Observed(fp8=fp8.find_fp8_layers(list(model.named_modules()), asked, []))
        row = {each.name: each for each in compare(seen, Plan(asked))}["fp8 recipe"]
        assert row.found == "tensorwise 1, blockwise 1, mxfp8 1, none 1" and row.verdict is Verdict.AS_ASKED
    assert model.gate.fp8_meta["recipe"].fp8_format.name == "E4M3", "MXFP8, where the policy is hybrid"
    mpguard.revert(model)
    assert type(model.up) is nn.Linear


@pytest.mark.usefixtures("transformer_engine")
def test_a_backward_pass_in_high_precision_is_in_the_recipe_of_the_layer() -> None:
    model, asked = Block(), policy(down="tensorwise_with_bwd_hp", last="mxfp8_with_bwd_hp")
    mpguard.convert(model, asked)
    model(torch.randn(32, 64))
    found = {name: layer.fp8_meta["recipe"].backward_override for name, layer in model.named_children()}
    assert found == {"up": None, "gate": None, "down": "high_precision", "last": "high_precision"}


@pytest.mark.usefixtures("transformer_engine")
def test_without_own_recipes_an_autocast_around_the_model_has_its_recipe() -> None:
    model = Block()
    mpguard.convert(model, policy())
    other = sys.modules["transformer_engine.common.recipe"].Float8BlockScaling()
    with autocast(other):
        model(torch.randn(32, 64))
    assert model.up.fp8_meta["recipe"] is other
