"""Each check returns its row with a verdict, the allowance that it needs, and the advice; no torch is needed."""

from __future__ import annotations

import dataclasses
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

import mpguard
from mpguard.policy.allow import allowances
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.autocast_regions import Autocast, EnteredRegion
from mpguard.runtime.proof.checks import CHECKS, compare, failures
from mpguard.runtime.proof.checks.common import format_allowance, name_pattern
from mpguard.runtime.proof.inferred import OUTSIDE
from mpguard.runtime.proof.observe import Computed, Observed
from mpguard.runtime.proof.verdict import Failure, FailureKind, Refusal, Row, Verdict

PLAN = Plan(mpguard.recipe("bf16_mixed"), strategy="ddp", processes=2)

#: Two ranks of DDP as asked.
SEEN = Observed(
    engine="ddp", world_size=2, launched=2, parameters={"fp32": 100}, gradients={"fp32": 100}, masters={"fp32": 100},
    states={"fp32": 200}, reductions={"fp32": 100}, reduced_by="the collective", optimizer="AdamW",
    computed=[Computed(True, "bf16", 900, "body", "body (Linear of Net)")],
)  # fmt: skip


def row(name: str, plan: Plan = PLAN, **changes: Any) -> Row:
    return next(each for each in compare(dataclasses.replace(SEEN, **changes), plan) if each.name == name)


def message(plan: Plan = PLAN, **changes: Any) -> str:
    seen = dataclasses.replace(SEEN, **changes)
    return Refusal(tuple(failures(compare(seen, plan), plan, seen))).reasons


def allowing(*names: str) -> Plan:
    return dataclasses.replace(PLAN, allow=allowances(list(names)))


FP32 = Plan(mpguard.recipe("fp32"))

FP8_PLAN = dataclasses.replace(PLAN, policy=mpguard.recipe("bf16_with_fp8_current_scaling_mixed"))

FROZEN = [*SEEN.computed, Computed(False, "fp16", 1, inside=True)]

#: A perceptual loss in FP32, larger than the model: around weights that nothing trains the script leaves autocast.
PERCEPTUAL = Computed(
    True, "fp32", 90_000, place="a Conv2d whose weights no optimizer has", by_script=True, untrained=True
)

#: A part of the model that the script computes in FP32.
ISLAND = Computed(True, "fp32", 9_000, "head", "head (Linear of Net)", by_script=True)


@pytest.mark.parametrize(
    ("name", "plan", "changes", "verdict"),
    [
        ("engine", PLAN, {}, Verdict.AS_ASKED),
        ("engine", PLAN, {"engine": "none", "reductions": {}}, Verdict.UNPROVEN),
        ("engine", allowing("local_sgd"), {"engine": "none", "reductions": {}}, Verdict.ALLOWED),
        ("engine", Plan(PLAN.policy), {}, Verdict.NOT_ASKED),
        ("processes", Plan(PLAN.policy), {"launched": 2}, Verdict.NOT_ASKED),
        ("processes", Plan(PLAN.policy), {"world_size": 1}, Verdict.WRONG),
        ("processes", allowing("idle_ranks: 1"), {"idle": 1, "world_size": 1}, Verdict.ALLOWED),
        ("compute", PLAN, {"computed": []}, Verdict.UNPROVEN),
        ("compute", PLAN, {"computed": [], "matrices": False, "passes": 1}, Verdict.NOT_ASKED),
        ("compute", PLAN, {"computed": [], "without_products": True}, Verdict.NOT_ASKED),
        ("casts to fp16", PLAN, {"casts": {"fp16": {"net.noise": 300}, "bf16": {"x": 300}}}, Verdict.UNPROVEN),
        ("casts to bf16", FP32, {"casts": {"bf16": {"net.noise": 300}}}, Verdict.UNPROVEN),
        ("compute", PLAN, {"computed": [Computed(False, "bf16", 9, evaluated=True)]}, Verdict.AS_ASKED),
        ("compute", PLAN, {"computed": [Computed(False, "fp32", 9, evaluated=True)]}, Verdict.UNPROVEN),
        ("compute", PLAN, {"computed": [Computed(False, "bf16", 9, evaluated=True)], "passes": 1}, Verdict.UNPROVEN),
        ("compute", FP32, {"computed": [Computed(True, "fp64", 9)]}, Verdict.NOT_ASKED),
        ("parameters", FP32, {"parameters": {"fp64": 90, "fp32": 10}}, Verdict.NOT_ASKED),
        ("parameters", FP32, {"parameters": {"fp64": 10, "fp32": 90}}, Verdict.AS_ASKED),
        ("gradients", FP32, {"gradients": {"fp64": 1}}, Verdict.NOT_ASKED),
        ("optimizer", FP32, {"masters": {"fp64": 1}}, Verdict.NOT_ASKED),
        (
            "compute",
            FP8_PLAN,
            {"computed": [Computed(True, "fp8", 95), Computed(True, "bf16", 4), Computed(True, "fp32", 1)]},
            Verdict.AS_ASKED,
        ),
        ("compute", FP8_PLAN, {"computed": [Computed(True, "fp8", 95), Computed(True, "fp32", 5)]}, Verdict.WRONG),
        (
            "without gradient",
            PLAN,
            {"computed": [*SEEN.computed, Computed(False, "fp32", 9, None, OUTSIDE)]},
            Verdict.NOT_ASKED,
        ),
        ("compute", PLAN, {"computed": [*SEEN.computed, PERCEPTUAL]}, Verdict.AS_ASKED),
        ("fp32 by the script", PLAN, {"computed": [*SEEN.computed, PERCEPTUAL]}, Verdict.NOT_ASKED),
        ("compute", PLAN, {"computed": [*SEEN.computed, PERCEPTUAL, ISLAND]}, Verdict.WRONG),
        ("compute", PLAN, {"computed": [PERCEPTUAL]}, Verdict.WRONG),
        ("compute", PLAN, {"computed": [*SEEN.computed, replace(PERCEPTUAL, by_script=False)]}, Verdict.WRONG),
        ("compute", PLAN, {"computed": [*SEEN.computed, replace(PERCEPTUAL, untrained=False)]}, Verdict.WRONG),
        ("frozen parts", PLAN, {"computed": FROZEN}, Verdict.WRONG),
        ("frozen parts", allowing("frozen: fp16"), {"computed": FROZEN}, Verdict.ALLOWED),
        ("reduction", PLAN, {"reductions": {}}, Verdict.UNPROVEN),
        ("accumulated values", PLAN, {"engine": "fsdp1", "accumulation": {"fp32": 100}}, Verdict.UNPROVEN),
        (
            "accumulated values",
            Plan(mpguard.recipe("bf16_full")),
            {"engine": "deepspeed-zero2", "accumulation": {"bf16": 100}},
            Verdict.NOT_ASKED,
        ),
        ("reduction", allowing("local_sgd"), {"reductions": {}}, Verdict.ALLOWED),
        ("reduction", PLAN, {"averaging": "LocalSGD"}, Verdict.NOT_ASKED),
        ("gradients", PLAN, {"gradients": {}}, Verdict.UNPROVEN),
        ("optimizer", PLAN, {"masters": {}}, Verdict.UNPROVEN),
        ("optimizer", allowing("states: bf16"), {"states": {"bf16": 1}}, Verdict.ALLOWED),
        ("optimizer", PLAN, {"states": {"int8": 1}}, Verdict.NOT_ASKED),
        ("kept in bf16", allowing("bf16: wte"), {"kept": {"wte": 10}}, Verdict.ALLOWED),
        ("allow", allowing("frozen: fp16"), {}, Verdict.NOT_ASKED),
    ],
)
def test_the_verdict_of_a_row(name: str, plan: Plan, changes: dict[str, Any], verdict: Verdict) -> None:
    found = row(name, plan, **changes)
    assert found.verdict is verdict, found
    assert found.data()["ok"] is {Verdict.AS_ASKED: True, Verdict.WRONG: False}.get(verdict)
    assert bool(found.allowed) is (verdict is Verdict.ALLOWED)


def test_a_check_that_fails_makes_its_row_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_seen: Observed, _plan: Plan) -> Row:
        raise KeyError("broken")

    monkeypatch.setitem(CHECKS, "gradients", broken)
    assert row("gradients", errors={}).verdict is Verdict.UNPROVEN


# -- messages ------------------------------------------------------------------------------------


def test_a_message_has_a_line_per_row_and_one_remedy() -> None:
    text = message(parameters={"bf16": 90, "fp32": 10}, masters={"bf16": 90, "fp32": 10}, gradients={"bf16": 100},
                   in_bf16=["transformer.wte", "value_embeds.1", "value_embeds.3"])  # fmt: skip
    *rows, remedy = text.split("\n  ")
    assert [line.split(":")[0] for line in rows] == ["parameters", "gradients", "optimizer"]
    assert remedy.startswith("remedy: The optimizer's parameters are the master weights: create and load them in fp32")
    assert '; or accept parameters: mpguard_allow: [{bf16: "*wte"}, {bf16: "*value_embeds*"}]' in remedy
    assert "keep them in fp32" not in remedy, "that of the cause only"


def test_what_is_proposed_to_allow_can_be_copied() -> None:
    """It contains what is allowed already, and it is enough: with it, nothing is wrong."""
    wide = [Computed(True, "fp32", 500 - n, f"layers.{n}.router", "router (Linear of Net)") for n in range(3)]
    computed = [*SEEN.computed, *wide, Computed(True, "fp32", 300, "head", "head (Linear of Net)")]
    text = message(allowing("frozen: fp16"), computed=computed)
    assert text.endswith('or accept it: mpguard_allow: [{frozen: fp16}, {fp32: "*router"}, {fp32: head}]'), text
    accepted = allowing("frozen: fp16", "fp32: *router", "fp32: head")
    assert row("compute", accepted, computed=computed).verdict is Verdict.ALLOWED
    fewer = message(computed=[*SEEN.computed, *wide, Computed(True, "fp32", 9, "head", "head (Linear of Net)")])
    assert fewer.endswith('mpguard_allow: [{fp32: "*router"}]'), "a small head may be wider"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("head", "head"),
        ("transformer.wte", "*wte"),
        ("value_embeds.3", "*value_embeds*"),
        ("layers.0.attn.q_proj", "*q_proj"),
        ("0", "0"),
        ("0.1", "0.1"),
    ],
)
def test_the_pattern_of_a_module(name: str, pattern: str) -> None:
    from mpguard.nn.fp8.filters import pattern_around

    assert name_pattern(name) == pattern and pattern_around(f"{name}.weight", [pattern]) == pattern


@pytest.mark.parametrize("value", ["*wte", "lm_head", "code outside of modules", "a: b", "[x]", "#", "1.router"])
def test_an_allowance_is_yaml(value: str) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(f"[{format_allowance('bf16', value)}]") == [{"bf16": value}]


def test_the_remedy_does_not_repeat_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"engine": "single", "world_size": 1, "launched": 2}
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert "set ACCELERATE_USE_CPU=true" in message(**alone)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    text = message(**alone)
    assert "ACCELERATE_USE_CPU" not in text and "MULTI_CPU" not in text and "`accelerator.prepare`" in text
    assert text.count("each trains a model of its own") == 1 and text.startswith("engine: single process; asked: ddp\n")
    monkeypatch.delitem(sys.modules, "accelerate")
    assert "The script builds no process group" in message(**alone)


@pytest.mark.parametrize("used", [False, True])
def test_the_remedy_names_the_framework_that_is_used(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """Not one that is only imported. Lightning is not installed here: its class stands for it."""
    module = types.ModuleType("lightning.fabric.fabric")
    module.Fabric = type("Fabric", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fabric = module.Fabric() if used else None
    text = message(computed=[Computed(True, "fp32", 900)])
    assert ('Fabric(precision="bf16-mixed")' in text) is used, text
    assert ("Autocast (or the engine) was not in force" in text) is (fabric is None)


def test_what_is_wrong_comes_before_what_is_not_proven() -> None:
    unproven = Failure(FailureKind.UNPROVEN, "no result from rank 1")
    wrong = Failure(FailureKind.WRONG, "compute: fp32; asked: bf16", "compute")
    assert Refusal((unproven, wrong)).reasons == "compute: fp32; asked: bf16\n  not proven: no result from rank 1"


# -- which model, which optimizer, and what to do ------------------------------------------------


def test_a_process_with_several_optimizers_names_the_one_that_is_wrong() -> None:
    updates = "`0.weight` [32 x 16] and 5 more of Sequential"
    found = message(computed=[Computed(True, "fp32", 900, "0")], updates=updates)
    assert f"compute: fp32; asked: bf16 (in the step of AdamW, which updates {updates})" in found
    assert "in the step of" not in message(computed=[Computed(True, "fp32", 900, "0")])


FP16 = Plan(mpguard.recipe("fp16_mixed"))
WIDE = [Computed(True, "fp32", 900, "body")]
SCRIPTED = [Computed(True, "fp32", 900, "body", by_script=True)]


@pytest.mark.parametrize(
    ("plan", "changes", "advice"),
    [
        (FP16, {"scaler": {"kind": "GradScaler", "enabled": False, "scale": 1.0}, "unscaled": True}, "Enable it"),
        (
            FP16,
            {"computed": SEEN.computed, "autocast": Autocast([EnteredRegion("cpu", "bf16", enabled=True)])},
            "was entered: pass dtype=torch.float16 (without `dtype` it is bf16 on a CPU), or choose a policy of bf16",
        ),
        (FP16, {"computed": SEEN.computed}, "Remove the cast to bf16 there (of weights or of activations)"),
        (
            FP32,
            {"computed": SEEN.computed, "autocast": Autocast([EnteredRegion("cpu", "bf16", enabled=True)])},
            "was entered: remove it, or choose a policy of bf16",
        ),
        (PLAN, {"computed": WIDE}, "run the forward pass inside it"),
        (PLAN, {"computed": WIDE, "autocast": Autocast()}, "No autocast region was entered around the forward pass"),
        (PLAN, {"computed": WIDE, "autocast": Autocast(), "compiled": True}, "(or the engine) was not in force"),
        (
            PLAN,  # a library has switched it off around a part of its model
            {"computed": WIDE, "autocast": Autocast([EnteredRegion("cpu", "bf16", enabled=False, in_module=True)])},
            "No autocast region was entered around the forward pass",
        ),
        (PLAN, {"reductions": {"bf16": 100}, "sent_by": {"bf16": ["script"]}}, "cast them to torch.float32 before its"),
        (PLAN, {"reductions": {"bf16": 100}, "sent_by": {"bf16": ["hook"]}}, "remove the hook"),
        (PLAN, {"masters": {"bf16": 1}, "pretrained": True}, "`from_pretrained(NAME, dtype=torch.float32)`"),
        (PLAN, {"masters": {"bf16": 1}, "default_dtype": "bf16"}, "set torch's default dtype, which is bf16"),
        (PLAN, {"computed": SCRIPTED}, "has left autocast, or switched it off, around 100 % of the matmuls"),
    ],
)
def test_advice_names_the_cause(plan: Plan, changes: dict[str, Any], advice: str) -> None:
    assert advice in message(plan, **changes)


def test_attention_has_no_advice_of_its_own_where_all_matmuls_are_in_that_dtype() -> None:
    both = [Computed(True, "fp16", 900, "body"), Computed(True, "fp16", 100, "body", attention=True)]
    assert "Cast the queries" in row("attention", computed=[*SEEN.computed, both[1]]).advice
    assert not row("attention", computed=both).advice


def test_attention_in_a_wider_dtype_is_said_to_be_wider() -> None:
    found = row("attention", computed=[*SEEN.computed, Computed(True, "fp32", 90, attention=True)])
    assert (found.verdict, found.found) == (
        Verdict.NOT_ASKED, "fp32 (wider than bf16: torch, or the script, computes it so)",
    )  # fmt: skip
    mixed = [Computed(True, "bf16", 90, attention=True), Computed(True, "fp32", 10, attention=True)]
    assert row("attention", computed=mixed).verdict is Verdict.AS_ASKED


@pytest.mark.parametrize(
    ("plan", "casts"),
    [
        (PLAN, {"bf16": {"net": 300}}),
        (FP32, {"bf16": {"net": 200}}),
        (allowing("frozen: fp16"), {"fp16": {"teacher": 300}}),
        (Plan(mpguard.recipe("bf16_with_fp8_rowwise_mixed")), {"fp8": {"net.0": 300}}),
    ],
    ids=["of the policy", "few", "allowed", "fp8 recipe"],
)
def test_casts_that_the_run_asks_for_or_that_are_few_are_no_row(plan: Plan, casts: dict[str, dict[str, int]]) -> None:
    rows = compare(dataclasses.replace(SEEN, casts=casts), plan)
    assert not [each for each in rows if each.name.startswith("casts")]


@pytest.mark.parametrize(
    ("plan", "reductions", "share"),
    [
        (PLAN, {"fp32": 995, "bf16": 5}, "0.5 %"),
        (PLAN, {"fp32": 99950, "fp16": 50}, "below 0.1 %"),
        (PLAN, {"fp32": 1000}, ""),
        (PLAN, {"fp32": 980, "bf16": 20}, ""),
        (allowing("bf16: '*wte'"), {"fp32": 995, "bf16": 5}, ""),
    ],
)
def test_a_small_share_that_is_reduced_in_fewer_bits_is_named(
    plan: Plan, reductions: dict[str, int], share: str
) -> None:
    rows = compare(dataclasses.replace(SEEN, reductions=reductions), plan)
    found = [each for each in rows if each.name == "reduced in fewer bits"]
    assert [each.found.startswith(share) and each.verdict is Verdict.UNPROVEN for each in found] == [True] * bool(share)
    verdict = next(each.verdict for each in rows if each.name == "reduction")
    assert verdict is (Verdict.WRONG if "bf16" in reductions and not found and plan is PLAN else Verdict.AS_ASKED)


def test_one_rank_that_trains_next_to_idle_ones_reduces_nothing() -> None:
    assert row("reduction", world_size=1, idle=3).found == "none: one process trains"
    assert row("reduction", world_size=1).found == "none: one process"


@pytest.mark.parametrize("step", [1, 11])
def test_fp8_layers_that_are_gone_after_the_first_step_were_replaced(step: int) -> None:
    found = message(Plan(mpguard.recipe("bf16_with_fp8_rowwise_mixed")), step=step)
    assert "no FP8 module in the model" in found and ("Layers that the script replaces" in found) is (step > 1)
