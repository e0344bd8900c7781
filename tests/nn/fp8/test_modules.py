"""A recipe per module: each layer multiplies in that of its pattern, compiled too, and wrong patterns are refused."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

pytest.importorskip("torchao", reason="the real library runs here")

import torch
from torch import nn

import mpguard
from mpguard.core.errors import NotInForce, PolicyError
from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.convert import convert_named
from mpguard.nn.fp8.module_patterns import similar
from mpguard.nn.fp8.torchao import TorchaoFloat8Linear
from mpguard.nn.fp8.torchao_mxfp8 import TorchaoMXFP8Linear
from mpguard.policy import hardware
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import fp8
from mpguard.runtime.proof.checks import compare
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(32, 96), "proj": nn.Linear(32, 32)})
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn["qkv"](x).chunk(3, -1)
        x = x + self.attn["proj"](q + k + v)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


FIRST, MLP, QKV = (
    {"pattern": "layers.0.*", "recipe": "none"},
    {"pattern": "*.mlp.*", "recipe": "rowwise"},
    {"pattern": "*.qkv", "recipe": "mxfp8"},
)


def policy(*modules: Any, **fields: Any) -> mpguard.Policy:
    plain: dict[str, Any] = {"bf16": True, "fp8": "hybrid", "backend": "torchao", "fp8_emulate": True, "compile": False}
    return mpguard.Policy(**{**plain, "fp8_modules": modules, **fields})


def step(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(32, 32)).float().square().mean().backward()


def rows_of(model: nn.Module, asked: mpguard.Policy) -> dict[str, Row]:
    seen = Observed(fp8=fp8.find_fp8_layers(list(model.named_modules()), asked, []))
    return {row.name: row for row in compare(seen, Plan(asked))}


def test_each_layer_has_the_recipe_of_the_first_pattern_that_matches_it() -> None:
    model, asked = Model(), policy(FIRST, MLP, QKV)
    report = mpguard.convert(model, asked)
    assert str(report).startswith("4 of 9 Linear layers in FP8 (torchao 1 tensorwise, 2 rowwise, 1 mxfp8, emulated)")
    assert dict(report.skipped)["layers.0.mlp.0"] == filters.NO_RECIPE
    block = model.layers[1]
    assert type(block.attn["qkv"]) is TorchaoMXFP8Linear and type(block.mlp[0]) is TorchaoFloat8Linear
    assert "AXISWISE" in str(block.mlp[0].config.cast_config_input.scaling_granularity)
    assert "TENSORWISE" in str(block.attn["proj"].config.cast_config_input.scaling_granularity)
    step(model)
    row = rows_of(model, asked)["fp8 recipe"]
    assert row.found == "tensorwise 1, rowwise 2, mxfp8 1, none 4" and row.verdict is Verdict.AS_ASKED
    mpguard.revert(model)
    assert all(type(each) is not TorchaoFloat8Linear for each in model.modules())


def test_the_values_are_those_of_a_model_with_one_recipe() -> None:
    """A layer computes what it computes where all layers have its recipe, compiled too."""
    inputs = torch.randn(32, 32)
    for entry, recipe in (
        (MLP, "rowwise"),
        (QKV, "mxfp8"),
        ({**MLP, "recipe": "rowwise_with_gw_hp"}, "rowwise_with_gw_hp"),
    ):
        results = []
        for asked in (policy(entry), policy(fp8="e4m3", fp8_recipe=recipe)):
            block = Block()
            block.load_state_dict(Model().layers[1].state_dict())
            mpguard.convert(holder := nn.ModuleDict({"layer": block}), asked)
            layer = dict(holder.named_modules())["layer.attn.qkv" if recipe == "mxfp8" else "layer.mlp.0"]
            for call in (layer, torch.compile(layer, backend="aot_eager")):
                layer.zero_grad()
                output = call(inputs)
                output.square().mean().backward()
                results += [output.detach(), layer.weight.grad.clone()]
        for one, other in zip(results[:4], results[4:], strict=True):
            assert torch.equal(one, other), recipe


def test_a_layer_that_runs_in_another_recipe_is_wrong_by_count() -> None:
    model = Model()
    mpguard.convert(model, policy(MLP))
    step(model)
    row = rows_of(model, policy(FIRST, {**MLP, "recipe": "mxfp8"}))["fp8 recipe"]
    assert row.verdict is Verdict.WRONG and "6 not in their own" in row.found
    assert "layers.0.attn.qkv ran in tensorwise, asked: none" in row.found
    assert "other 4" in row.found, "rowwise is no recipe of that policy"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"pattern": "*.mpl.*", "recipe": "rowwise"}], r"`\*.mpl.\*` matches no layer; did you mean `\*.mlp.\*`"),
        ([{"pattern": "mlp.*", "recipe": "rowwise"}], r"did you mean `\*.mlp.\*` \(as layers.0.mlp.0\)"),
        ([{"pattern": "*.mlp", "recipe": "none"}], r"did you mean `\*.mlp.\*`"),
        ([{"pattern": "model.layers.0.*", "recipe": "none"}], r"did you mean `layers.0.\*`"),
        (
            [{"pattern": "*.feedforward.*", "recipe": "none"}],
            r"matches no layer; the first layers are layers.0.attn.qkv",
        ),
        ([{"pattern": "layers", "recipe": "none"}], r"did you mean `layers.\*`"),
        ([MLP, {"pattern": "*.mlp.0", "recipe": "none"}], r"`\*.mlp.0` decides no layer: \*.mlp.\* before it"),
        ([{"pattern": "lm_head", "recipe": "rowwise"}], r"no layer of it can be FP8: lm_head: fp8_exclude"),
    ],
)
def test_a_pattern_that_decides_nothing_is_refused_by_convert_and_by_the_proof(
    entries: list[Any], message: str
) -> None:
    model = Model()
    with pytest.raises(PolicyError, match=message):
        mpguard.convert(model, policy(*entries))
    assert type(model.lm_head) is nn.Linear, "nothing was changed"
    mpguard.convert(model, policy())
    row = rows_of(model, policy(*entries))["fp8_modules"]
    assert row.verdict is Verdict.WRONG
    with pytest.raises(PolicyError, match=message):
        raise PolicyError(row.found)


def test_a_pattern_may_be_for_another_model_of_the_run() -> None:
    """A generator and a discriminator have one policy, and a proof each."""
    asked = policy({"pattern": "*.qkv", "recipe": "rowwise"}, {"pattern": "critic", "recipe": "none"})
    body, critic = Model(), nn.ModuleDict({"critic": nn.Linear(32, 32), "value": nn.Linear(32, 32)})
    for model in (body, critic):
        modules = list(model.named_modules())
        convert_named(model, modules, asked)
    step(body)
    for model in (body, critic):
        assert "fp8_modules" not in rows_of(model, asked)


def test_similar_patterns() -> None:
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
    assert similar("*.self_atn.*", names) == "*.self_attn.*"
    assert similar("layers.*.mlp.*", names) == "*.layers.*.mlp.*"
    assert similar("q_proj", names) == "*.q_proj"
    assert similar("experts", names) is None


def test_sizes_and_rows_are_those_of_the_recipe_of_a_layer() -> None:
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    report = mpguard.convert(model, policy({"pattern": "0", "recipe": "mxfp8"}, fp8_required=False))
    assert report.converted == ("1",) and dict(report.skipped) == {"0": "48 and 48 are not multiples of 32"}
    both = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mpguard.convert(both, policy({"pattern": "0", "recipe": "mxfp8"}))
    with pytest.warns(mpguard.MpguardWarning, match="has 16 rows, FP8 matmuls need a multiple of 32"):
        assert both(torch.randn(16, 64)).shape == (16, 64)


def test_block_scaling_of_torchao_is_refused_here_with_the_reason() -> None:
    asked = mpguard.Policy(bf16=True, fp8="e4m3", fp8_recipe="blockwise", backend="torchao")
    with pytest.raises(NotInForce, match=r"needs compute capability 9\.0 \(this machine has no GPU"):
        mpguard.convert(nn.Sequential(nn.Linear(128, 128)), asked)
    with pytest.raises(PolicyError, match="only torchao emulates FP8: tensorwise, rowwise"):
        asked.replace(fp8_emulate=True)
    libraries = {"torchao": "0.18", "triton": "3"}
    hopper = hardware.Hardware("H100", (9, 0), 1, (13, 0), libraries)
    assert hopper.refuses(asked) is None
    for other, reason in (
        (hardware.Hardware("B200", (10, 0), 1, (13, 0), libraries), "not available from compute capability 10.0"),
        (hardware.Hardware("H100", (9, 0), 1, (13, 0), {"torchao": "0.18"}), "needs Triton"),
        (hardware.Hardware("H100", (9, 0), 1, (12, 4), libraries), "needs CUDA 12.9"),
    ):
        assert reason in (other.refuses(asked) or "")
    assert "in E4M3 and with BF16 compute only" in (hopper.refuses(asked.replace(fp8="hybrid")) or "")
    both = hardware.Hardware("H100", (9, 0), 1, (13, 0), {**libraries, "te": "2.20"})
    assert hardware.backend_of(asked.replace(backend="auto"), both) == "te", "torchao's is a prototype"
    assert filters.multiple("blockwise", "torchao") == 128 and filters.multiple("blockwise", "te") == 16


@dataclasses.dataclass
class Float8CurrentScaling:
    """As Transformer Engine's recipe, by the fields that are compared."""

    fp8_format: Any = dataclasses.field(default_factory=lambda: types.SimpleNamespace(name="HYBRID"))
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass
class Float8BlockScaling:
    fp8_format: Any = dataclasses.field(default_factory=lambda: types.SimpleNamespace(name="E4M3"))
    backward_override: str | None = None


class TeLinear(nn.Module):
    """As a layer of Transformer Engine after a forward pass, which leaves the recipe in `fp8_meta`."""

    __module__ = "transformer_engine.stand_in"

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.weight, self.fp8_meta, self.fp8 = nn.Parameter(torch.zeros(16, 16)), {"recipe": recipe}, recipe is not None


def test_the_recipe_of_each_layer_of_transformer_engine_is_read() -> None:
    entries = [{"pattern": "up", "recipe": "tensorwise_with_bwd_hp"}, {"pattern": "gate", "recipe": "tensorwise"}]
    asked = mpguard.Policy(bf16=True, fp8="e4m3", fp8_recipe="blockwise", backend="te", fp8_modules=entries)
    e4m3 = types.SimpleNamespace(name="E4M3")
    ran: dict[str, Any] = {
        "up": Float8CurrentScaling(e4m3, backward_override="high_precision"),
        "gate": Float8CurrentScaling(e4m3),
        "down": Float8BlockScaling(),
    }
    for name, other, text in (
        ("up", None, ""),
        ("up", ran["gate"], "up ran in tensorwise, asked: tensorwise_with_bwd_hp"),
        ("gate", ran["up"], "gate ran in tensorwise_with_bwd_hp, asked: tensorwise"),
        ("down", Float8CurrentScaling(), "down ran in other, asked: blockwise"),
        ("down", "none", "down ran in other, asked: blockwise"),
    ):
        layers = ran if other is None else {**ran, name: None if other == "none" else other}
        model = nn.ModuleDict({each: TeLinear(recipe) for each, recipe in layers.items()})
        seen = Observed(fp8=fp8.find_fp8_layers(list(model.named_modules()), asked, [{"recipe": "any"}]))
        row = {each.name: each for each in compare(seen, Plan(asked))}["fp8 recipe"]
        assert row.verdict is (Verdict.WRONG if text else Verdict.AS_ASKED) and text in row.found, row
