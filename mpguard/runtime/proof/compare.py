"""What is in force against what was asked: rows, a verdict over all ranks, a table, a JSON file."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpguard.nn import compile as compilation
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.fp8 import Fp8Found
from mpguard.runtime.proof.observe import Observed
from mpguard.targets.plugin import get

ACCELERATE_ENGINES = ". accelerate applies FSDP and DeepSpeed only on a GPU and goes on without a word elsewhere"
ACCELERATE_ALONE = "accelerate spreads it without a GPU only where ACCELERATE_USE_CPU=true (`mpguard launch` sets it)"

#: What the model that mpguard compiled in place may not have been.
CALL_IT = "Call the model itself, or add `step = torch.compile(step)` for what is called instead"

#: What of Transformer Engine rounds the weights that are kept in FP8, by recipe.
ROUNDED_BY = {
    "delayed": "Float8Quantizer", "tensorwise": "Float8CurrentScalingQuantizer", "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
}  # fmt: skip

#: Rows without which a low-precision run is not proven.
MUST_BE_SEEN = ("compute", "reduction")

#: A dtype that holds less than this share of the elements is an island (a router, a head), not the run.
ISLAND = 0.5


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the proof. ok: None where it could not be observed, or nothing is asked."""

    name: str
    found: str
    asked: str = ""
    ok: bool | None = True

    @property
    def verdict(self) -> str:
        if self.ok is None:
            return "not observed" if not self.found or self.found == "not observed" else ""
        return "as asked" if self.ok else f"asked: {self.asked}"


@dataclasses.dataclass(frozen=True)
class Proof:
    """The outcome for a run. failures: one sentence each, with the rank where there are several."""

    verdict: str
    plan: Plan
    rows: tuple[Row, ...] = ()
    failures: tuple[str, ...] = ()
    observed: Observed | None = None

    @property
    def in_force(self) -> bool:
        return self.verdict == "in force"

    def table(self) -> str:
        """The lines for people."""
        seen = self.observed
        if seen is None:
            return "\n".join(self.failures)
        ranks = f"all {seen.world_size} ranks" if seen.world_size > 1 else "1 process"
        head = f"step {seen.step} proven in force on {ranks}" if self.in_force else f"step {seen.step}: {self.verdict}"
        skipped = f", after {seen.skipped} skipped" if seen.skipped else ""
        unseen = [row.name for row in self.rows if row.found == "not observed"]
        if unseen and self.in_force:
            skipped += f", but for what could not be observed: {', '.join(unseen)}"
        lines = [f"{head}{skipped} · recipe {self.plan.policy.name}"]
        wide = max((len(row.found) for row in self.rows), default=0)
        lines += [f"  {row.name:14} {row.found:{wide}}  {row.verdict}".rstrip() for row in self.rows]
        return "\n".join(lines)

    def write(self, path: str | Path) -> None:
        """The file for machines. Raises `OSError`."""
        data = {
            "version": 1,
            "verdict": self.verdict,
            "recipe": self.plan.policy.name,
            "policy": self.plan.policy.settings(),
            "config": self.plan.config,
            "strategy": self.plan.strategy,
            "processes": self.plan.processes,
            "enforce": self.plan.enforce,
            "failures": list(self.failures),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "observed": dataclasses.asdict(self.observed) if self.observed else None,
        }
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def compare(seen: Observed, plan: Plan) -> tuple[Row, ...]:
    """One row per fact. Nothing here touches torch."""
    rows = [
        _engine(seen, plan),
        _processes(seen, plan),
        _parameters(seen, plan),
        _compute(seen, plan),
        *_fp8(seen, plan),
        _gradients(seen, plan),
        _reduction(seen, plan),
        _optimizer(seen, plan),
        *_scaler(seen, plan),
        *_others(seen, plan),
    ]
    return tuple(rows)


def failures(rows: Iterable[Row], plan: Plan, seen: Observed) -> list[str]:
    """The mismatches as sentences: what is, what was asked. Without any, what must be observed and could not be."""
    rows = list(rows)
    wrong = [f"{row.name}: {row.found}; asked: {row.asked}{_why(row, plan, seen)}" for row in rows if row.ok is False]
    if wrong or not plan.policy.low_precision:
        return wrong
    unseen = [row for row in rows if row.name in MUST_BE_SEEN and row.found == "not observed"]
    return [
        f"not proven: {row.name} could not be observed; asked: {row.asked}{_why(row, plan, seen)}" for row in unseen
    ]


def verdict_of(failures: Iterable[str]) -> str:
    """`in force`, `not in force`, or `not proven` where nothing is known to be wrong."""
    failures = list(failures)
    if not failures:
        return "in force"
    return "not proven" if all("not proven: " in failure for failure in failures) else "not in force"


def reduced_by_script(seen: Observed) -> bool:
    """Whether collectives that the script itself calls have reduced as much as there are gradients."""
    return seen.engine == "none" and sum(seen.reductions.values()) >= sum(seen.gradients.values()) > 0


def spread_by_nothing(seen: Observed) -> bool:
    """Whether this is one of several processes that trains a model of its own."""
    return seen.world_size > 1 and seen.engine == "none" and not reduced_by_script(seen)


def _why(row: Row, plan: Plan, seen: Observed) -> str:
    """What usually lies behind a mismatch, and what to do."""
    policy, accelerate = plan.policy, "accelerate" in sys.modules
    if row.name == "compute" and not seen.compute:
        return (
            ". No matrix product that mpguard knows is behind the gradients of this step; call mpguard before "
            "the first backward pass"
        )
    if row.name == "compute":
        return _where(seen, policy.compute_dtype.short)
    if row.name == "reduction" and not seen.reductions:
        return ". A communication hook, or a call of the process group's own, reduced where mpguard cannot hear it"
    if row.name == "processes" and seen.world_size == 1 and seen.launched > 1:
        return (
            f". {seen.launched} processes were started that do not know of each other, and each trains a model of "
            "its own: "
            "without a GPU set ACCELERATE_USE_CPU=true, or `distributed_type: MULTI_CPU` for `mpguard launch`"
        )
    if row.name == "processes":
        return ". Start as many as the config says (`mpguard launch` does), or change `num_processes`"
    if (
        row.name == "engine"
        and seen.engine in ("none", "single", "ddp")
        and (plan.strategy or "").startswith(("fsdp", "deepspeed"))
    ):
        return ACCELERATE_ENGINES if accelerate else ". Wrap the model, or give the config the engine that is meant"
    if row.name == "engine" and seen.engine == "none":
        alone = f". {seen.launched} processes each train a model of their own"
        return f"{alone}; {ACCELERATE_ALONE}" if accelerate else f"{alone}: wrap it in DistributedDataParallel"
    if row.name == "scaler" and seen.scaler is not None and seen.unscaled:
        return ". Call backward on what scaler.scale(loss) returns, for each loss"
    if row.name == "scaler" and seen.scaler is not None and seen.scaler["enabled"]:
        return ". A GradScaler that is made once mpguard is active has the policy's values: make it after that"
    if row.name == "scaler" and policy.fp16:
        return ". FP16 gradients below 6e-8 are lost without loss scaling; accelerate makes no GradScaler on the CPU"
    if row.name == "compile" and policy.low_bit_recipe == "delayed":
        return f". {compilation.NEVER}: compile nothing, or set fp8_recipe to tensorwise"
    if row.name == "compile" and policy.compile is True:
        return f". {CALL_IT}"
    if row.name == "not in fp8":
        return (
            ". Layers that come into a model after its optimizer are not converted: make the optimizer when the model "
            "is whole, or call mpguard.convert before the first step"
        )
    if row.name == "optimizer" and policy.master_dtype is Dtype.FP32:
        return ". Load the model in fp32: the optimizer's parameters are the master weights"
    if row.name == "fp8 weights":
        return (
            ". mpguard keeps the exact values of layers that it converts itself: build them as nn.Linear, without "
            "quantized_model_init, and set fp8_param"
        )
    if row.name == "parameters" and policy.script_requirements:
        return f"; {policy.script_requirements}"
    return ""


def _where(seen: Observed, asked: str) -> str:
    """Whose products ran in another dtype, and what to do about it."""
    others = [name for dtype, names in seen.computed_in.items() if dtype != asked for name in names]
    if not others or asked not in seen.compute:
        return ". Autocast (or the engine) was not in force around the forward pass"
    return (
        f". Most of the matrix products are those of {_names(others)}: have autocast enabled there, or leave it so, "
        "knowingly, with --enforce warn"
    )


def _engine(seen: Observed, plan: Plan) -> Row:
    found = {"none": "no wrapper around the model", "single": "single process"}.get(seen.engine, seen.engine)
    asked = plan.strategy
    if asked is None or (asked == "single" and seen.engine in ("single", "ddp") and seen.world_size == 1):
        return Row("engine", found, asked or "", None if asked is None else True)
    if asked == "ddp" and reduced_by_script(seen):
        return Row("engine", "gradients reduced by the script itself", asked, True)
    return Row("engine", found, asked, seen.engine == asked)


def _processes(seen: Observed, plan: Plan) -> Row:
    if plan.processes is None:
        ok = None if seen.launched in (1, seen.world_size) else False
        return Row("processes", str(seen.world_size), str(seen.launched), ok)
    return Row("processes", str(seen.world_size), str(plan.processes), seen.world_size == plan.processes)


def _parameters(seen: Observed, plan: Plan) -> Row:
    """DeepSpeed's engine holds the compute copy; everywhere else the model holds what the optimizer updates."""
    policy = plan.policy
    if not seen.parameters:
        return Row("parameters", "not observed", "", None)
    shards = {"fsdp1": " (sharded)", "fsdp2": " (sharded)"}.get(seen.engine, "")
    asked = policy.params_dtype if seen.engine.startswith("deepspeed") else policy.master_dtype
    assert asked is not None
    elements = sum(seen.parameters.values())
    found = f"{said(seen.parameters)}{shards}, {_amount(elements)}"
    exact = {dtype: count for dtype, count in seen.parameters.items() if dtype != "fp8"}  # `_kept` judges those
    return Row("parameters", found, asked.short, _mostly(exact, asked.short))


def _compute(seen: Observed, plan: Plan) -> Row:
    asked = plan.policy.compute_dtype.short
    if not seen.compute:
        return Row("compute", "not observed", asked, None)
    found = said(seen.compute)
    other = {"bf16": "fp16", "fp16": "bf16"}.get(asked)
    islands = [f"{dtype}: {_names(names)}" for dtype, names in seen.computed_in.items() if dtype != asked and names]
    ok = _mostly(seen.compute, asked) and other not in seen.compute
    if asked == "fp32":
        ok = set(seen.compute) <= {"fp32", "fp64"}
    return Row("compute", f"{found}; {'; '.join(islands)}" if islands and ok else found, asked, ok)


def _fp8(seen: Observed, plan: Plan) -> list[Row]:
    policy, fp8 = plan.policy, seen.fp8
    if policy.low_bit_recipe is None:
        if fp8 is None or fp8.entered is False:
            return []
        return [Row("fp8", f"{len(fp8.converted)} FP8 layers ({fp8.backend})", "none", False)]
    asked = f"{'fp4' if policy.fp4 else 'fp8'} {policy.low_bit_recipe} ({' or '.join(policy.backends)})"
    if fp8 is None:
        return [Row("fp8", "no FP8 module in the model", asked, False)]
    asked += ", emulated" if policy.fp8_emulate else ""
    wrong = [] if fp8.emulated == policy.fp8_emulate else ["emulation"]
    wrong += ["not the same in every layer"] if fp8.mixed else []
    if fp8.entered is False:
        wrong.append("FP8 autocast not entered around each of them")
    elif fp8.backend in policy.backends:
        wrong += _other_recipe(fp8, plan)
    found = f"{len(fp8.converted)} of {len(fp8.converted) + len(fp8.left)} Linear ({fp8.backend}"
    found += f" {fp8.recipe['recipe']}" if fp8.recipe else ""
    found += ", emulated)" if fp8.emulated else ")"
    ok = fp8.backend in policy.backends and not wrong
    rows = [Row("fp8", "; ".join([found, *wrong]), asked, ok)]
    if fp8.beside:
        beside = f"{_names(fp8.beside)} multiplied outside of the FP8 layer"
        asked = "each FP8 layer called; or named in fp8_exclude, where other code takes its weight"
        rows.append(Row("fp8 products", beside, asked, False))
    elif fp8.share is not None:
        rows.append(Row("fp8 products", f"{100 * fp8.share:.0f} % of the multiply-adds with weights", "", None))
    rows += _kept(fp8, plan)
    compute = policy.compute_dtype.short
    explained = [name for name, reason in fp8.left.items() if reason]
    reasons = dict.fromkeys(fp8.left[name] for name in explained)
    if explained:
        rows.append(Row(f"left in {compute}", f"{_names(explained)} ({'; '.join(reasons)})", "", None))
    if unexplained := [name for name, reason in fp8.left.items() if not reason]:
        rows.append(Row("not in fp8", _names(unexplained), "in fp8, or named in fp8_exclude", False))
    if fp8.against:
        rows.append(Row("fp8_exclude", f"{_names(fp8.against)} in fp8", f"left in {compute}", False))
    if fp8.unmatched:
        unmatched = f"{', '.join(fp8.unmatched)} matches no module"
        rows.append(Row("fp8_exclude", unmatched, "a pattern that matches", False))
    return rows


def _kept(fp8: Fp8Found, plan: Plan) -> list[Row]:
    """Weights that are kept in FP8, and their masters."""
    policy, layers, kept = plan.policy, len(fp8.converted), sum(fp8.kept.values())
    if not kept and not (policy.fp8_param and fp8.backend == "te" in policy.backends):
        return []
    found = f"{kept} of {layers} kept in FP8 ({', '.join(fp8.kept)})" if kept else "in high precision"
    found += f", masters {said(fp8.masters)}" if fp8.masters else ""
    found += f"; not made from exact weights: {_names(fp8.inexact)}" if fp8.inexact else ""
    if not policy.fp8_param:
        return [Row("fp8 weights", found, "in high precision", False)]
    rounded_by = ROUNDED_BY[policy.low_bit_recipe or ""]
    ok = fp8.kept == {rounded_by: layers} and set(fp8.masters) == {policy.master_dtype.short} and not fp8.inexact
    return [
        Row("fp8 weights", found, f"all kept in FP8 ({rounded_by}), exact masters in {policy.master_dtype.short}", ok)
    ]


def _other_recipe(fp8: Fp8Found, plan: Plan) -> list[str]:
    """Where the recipe in force differs from the policy's: field, found and asked."""
    if fp8.backend == "torchao":
        asked: dict[str, Any] = {"recipe": plan.policy.fp8_recipe}
    else:
        asked = get("te").arguments(plan.policy)
    return [
        f"{field} is {fp8.recipe.get(field)}, not {value}"
        for field, value in asked.items()
        if fp8.recipe.get(field) != value
    ]


def _gradients(seen: Observed, plan: Plan) -> Row:
    asked = plan.policy.master_dtype.short
    if not seen.gradients:
        return Row("gradients", "not observed", asked, None)
    return Row("gradients", said(seen.gradients), asked, _mostly(seen.gradients, asked))


def _reduction(seen: Observed, plan: Plan) -> Row:
    """A reduction in a wider dtype than asked loses nothing."""
    policy = plan.policy
    if seen.world_size == 1:
        return Row("reduction", "none: one process", "", None)
    asked = policy.reduce_dtype
    if not seen.reductions:
        return Row("reduction", "not observed", asked.short, None)
    total = sum(seen.reductions.values())
    narrow = [dtype for dtype, count in seen.reductions.items() if _bits(dtype) < asked.bits and count > total * 0.01]
    other = [dtype for dtype in seen.reductions if _bits(dtype) == asked.bits and dtype != asked.short]
    found = f"{said(seen.reductions)} ({seen.reduced_by})"
    return Row("reduction", found, asked.short, not narrow and not other)


def _optimizer(seen: Observed, plan: Plan) -> Row:
    asked = plan.policy.master_dtype.short
    if not seen.masters:
        return Row("optimizer", seen.optimizer or "not observed", asked, None)
    states = f", states {said(seen.states)}" if seen.states else ""
    found = f"{seen.optimizer}, weights {said(seen.masters)}{states}"
    narrow = [dtype for dtype in seen.states if dtype in ("bf16", "fp16") and dtype != asked]
    quantized = any(Dtype.spelled(dtype) is None for dtype in seen.states)  # the script's own choice of an optimizer
    ok = _mostly(seen.masters, asked) and not narrow
    return Row("optimizer", found, f"weights and states {asked}", None if ok and quantized else ok)


def _scaler(seen: Observed, plan: Plan) -> list[Row]:
    policy, scaler = plan.policy, seen.scaler
    enabled = scaler is not None and scaler["enabled"]
    if not policy.fp16:
        return [Row("scaler", f"{scaler['kind']}, scale {scaler['scale']:g}", "", None)] if scaler and enabled else []
    asked = "a fixed scale" if policy.loss_scale is not None else "dynamic loss scaling"
    if scaler is None or not enabled:
        return [Row("scaler", "none" if scaler is None else f"{scaler['kind']}, disabled", asked, False)]
    found = f"{scaler['kind']}, scale {scaler['scale']:g}"
    ok = True
    if policy.loss_scale is not None:
        asked = f"a fixed scale of {policy.loss_scale:g}"
        ok = abs(scaler["scale"] / policy.loss_scale - 1) < 1e-6
    elif scaler.get("window") is not None:
        asked = f"dynamic, window {policy.loss_scale_window}"
        found += f", window {scaler['window']}"
        ok = scaler["window"] == policy.loss_scale_window and scaler["scale"] <= policy.initial_loss_scale
    if seen.unscaled and not seen.engine.startswith("deepspeed"):
        found, ok = f"{found}; a loss that it did not scale went backward", False
    return [Row("scaler", found, asked, ok)]


def _others(seen: Observed, plan: Plan) -> list[Row]:
    policy, rows = plan.policy, []
    if policy.buffer_dtype is not None and seen.buffers:
        rows.append(
            Row(
                "buffers",
                said(seen.buffers),
                policy.buffer_dtype.short,
                _mostly(seen.buffers, policy.buffer_dtype.short),
            )
        )
    if policy.output_dtype is not None and seen.output is not None:
        rows.append(Row("output", seen.output, policy.output_dtype.short, seen.output == policy.output_dtype.short))
    if policy.tf32 is not None and seen.tf32 is not None:
        rows.append(Row("tf32", "on" if seen.tf32 else "off", "on" if policy.tf32 else "off", seen.tf32 == policy.tf32))
    if isinstance(policy.compile, bool):
        rows.append(
            Row(
                "compile",
                "compiled" if seen.compiled else "not compiled",
                "compiled" if policy.compile else "not compiled",
                seen.compiled == policy.compile,
            )
        )
    elif policy.low_bit_recipe == "delayed" and seen.compiled_fp8:
        rows.append(Row("compile", "FP8 layers are compiled", "delayed scaling not compiled", False))
    elif policy.low_bit_recipe:
        chosen = compilation.choice(policy)
        lost = f": {chosen.reason}. {CALL_IT}" if chosen.on and not seen.compiled else ""
        rows.append(Row("compile", "compiled" if seen.compiled else f"not compiled{lost}", "auto", None))
    return rows


def said(counts: Mapping[str, int]) -> str:
    """`bf16`, or `bf16 98 %, fp32 2 %`."""
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    if len(ordered) == 1:
        return ordered[0][0]
    return ", ".join(f"{dtype} {100 * count / total:.3g} %" for dtype, count in ordered)


def _mostly(counts: Mapping[str, int], dtype: str) -> bool:
    """Whether a dtype holds more than half of the elements; the rest is shown, and may be wider, not narrower."""
    total = sum(counts.values())
    narrower = sum(count for other, count in counts.items() if _bits(other) < _bits(dtype))
    return counts.get(dtype, 0) > total * ISLAND and narrower == 0


def _bits(dtype: str) -> int:
    known = Dtype.spelled(dtype)
    return known.bits if known else 8


def _names(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _amount(elements: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if elements >= size:
            return f"{elements / size:.3g} {unit}"
    return str(elements)
