"""Compare what was observed with the plan: rows, failures, and the `Proof` as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mpguard.nn import compile as compilation
from mpguard.nn.fp8.filters import pattern_around
from mpguard.policy.allow import BF16, FP32, FROZEN, IDLE_RANKS, LOCAL_SGD, LOSS_SCALING, QUANTIZED, STATES, Allowance
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.runtime.containment import has_failed
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import attention_masks, tf32
from mpguard.runtime.proof.fp8 import FAST_ACCUMULATION, Fp8Layers
from mpguard.runtime.proof.observe import Computed, Observed
from mpguard.runtime.proof.products import bits
from mpguard.runtime.proof.reductions import NOT_REDUCED
from mpguard.targets.plugin import get

ACCELERATE_ENGINES = (
    ". accelerate applies FSDP and DeepSpeed only on a GPU, and silently continues elsewhere. Run where there is a "
    "GPU, or wrap the model in the script"
)
ACCELERATE_ON_CPU = (
    "without a GPU accelerate distributes the model only with ACCELERATE_USE_CPU=true (`mpguard launch` sets it)"
)

#: What to do if a model that mpguard compiled in place was not called: the script calls something else.
CALL_THE_MODEL = "Call the model itself, or add `step = torch.compile(step)` for the function that is called instead"

#: The class of Transformer Engine that rounds the weights that are kept in FP8, by recipe.
QUANTIZERS = {
    "delayed": "Float8Quantizer", "tensorwise": "Float8CurrentScalingQuantizer", "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
}  # fmt: skip

#: What is found where TF32 is asked for on a CPU.
NO_TF32 = "none: the model is on the CPU, which has no TF32"

#: Rows without which a low-precision run is not proven.
REQUIRED_ROWS = ("compute", "reduction")

#: What is found where an optimizer updates only scalars and vectors (a temperature), and no product leads to them.
NO_PRODUCTS = "none: no matrix is trained"

#: What is found as engine where several processes have no wrapper.
NO_WRAPPER = "no wrapper around the model"

#: What is found as scaler where there is none, and after the class of one that is disabled.
NO_SCALER, DISABLED = "none", ", disabled"

#: What is found where a GradScaler has scaled the loss, and the optimizer was not stepped through it.
BYPASSED = "a GradScaler has scaled the loss, and the step went past it, with gradients that are still scaled"

#: At most this share of the products may be in a wider dtype than the policy's: a router, a small head. None may be in
#: a narrower one.
WIDER_SHARE = 0.1

#: So many elements of gradients that backward casts to a narrower dtype and back are refused, however large the model.
MANY = 256

#: The same for the elements of parameters, gradients and buffers: embeddings and norms in FP32 lose nothing.
WIDER_ELEMENTS = 0.5

#: The same where the products are inferred from autograd's graph, which shows neither attention nor what functions do.
INFERRED_SHARE = 0.5

#: What to do about weights whose values are rounded.
ROUNDED_WEIGHTS = (
    "What the small dtype rounds away of each update is lost: cast copies of the weights, not their values"
)

#: If more than this share of the products runs in kernels whose dtype is not known, nothing is proven.
UNKNOWN_SHARE = 0.05


#: If less than this share of the products is in FP8, the run is not what was asked: FP8 cannot save time in it.
LEAST_FP8_SHARE = 0.05

#: The share of an FP8 copy that may differ from its weight rounded again: its scale is known by its reciprocal only.
STALE_SHARE = 0.001


#: The beginning of what is found if something could not be observed.
UNOBSERVED = "not observed"


#: Characters of the names in a row, and of the column of what was found: longer texts have no verdict below each other.
NAMES_WIDTH, FOUND_WIDTH = 100, 60


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the proof. ok: None if it could not be observed, or if the plan does not define it.

    allowed: the deviation that the run allows, if the fact is another than asked because of it; then `ok` is None.
    """

    name: str
    found: str
    asked: str = ""
    ok: bool | None = True
    allowed: str = ""

    def data(self) -> dict[str, Any]:
        """Return the row as plain data; without `allowed` if nothing was."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "allowed" or value}

    @property
    def unobserved(self) -> bool:
        """True if it could not be observed."""
        return self.ok is None and self.found.startswith(UNOBSERVED)

    @property
    def verdict(self) -> str:
        if self.allowed:
            return f"allowed: {self.allowed}"
        if self.ok is None:
            return "not observed" if not self.found or self.unobserved else ""
        return "as asked" if self.ok else f"asked: {self.asked}"


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result for a run. verdict: see `verdict_of`. failures: messages, with the ranks if not all have it.

    The facts about the whole run are in the file only: see `write`.
    """

    verdict: str
    plan: Plan
    rows: tuple[Row, ...] = ()
    failures: tuple[str, ...] = ()
    observed: Observed | None = None

    @property
    def in_force(self) -> bool:
        return self.verdict == "in force"

    def table(self, *, first: bool = True) -> str:
        """Return the table that is printed. first: False for a further optimizer, whose name is in the first line."""
        seen = self.observed
        if seen is None:
            return "\n".join(self.failures)
        ranks = f"all {seen.world_size} ranks" if seen.world_size > 1 else "1 process"
        step = f"step {seen.step}" if first else f"step {seen.step} of {seen.optimizer}"
        head = (
            f"{step} proven in force{'' if first else ' too'} on {ranks}"
            if self.in_force
            else f"{step}: {self.verdict}"
        )
        notes = f", after {seen.skipped} skipped" if seen.skipped else ""
        named = {"frozen parts": _frozen_share(seen), "optimizer states": ", ".join(_quantized_states(seen))}
        if self.in_force and any(named.values()):
            notes += f" ({'; '.join(f'{name}: {found}' for name, found in named.items() if found)})"
        unobserved = [row.name for row in self.rows if row.unobserved]
        if unobserved and self.in_force:
            notes += f", except for what could not be observed: {', '.join(unobserved)}"
        lines = [f"{head}{notes} · recipe {self.plan.policy.name}"]
        width = max((len(row.found) for row in self.rows if len(row.found) <= FOUND_WIDTH), default=0)
        lines += [f"  {row.name:14} {row.found:{width}}  {row.verdict}".rstrip() for row in self.rows]
        return "\n".join(lines)

    def entry(self) -> dict[str, Any]:
        """Return what the proof file has about one of several optimizers."""
        seen = self.observed
        return {
            "optimizer": seen.optimizer if seen else "",
            "step": seen.step if seen else None,
            "verdict": self.verdict,
            "failures": list(self.failures),
            "rows": [row.data() for row in self.rows],
            "observed": seen.plain() if seen else None,
        }

    def write(self, path: str | Path, optimizers: Sequence[Proof] = (), run: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the proof as JSON. Raises `OSError`.

        optimizers: the proofs of all optimizers. run: facts about the steps of each optimizer up to now.
        """
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
            "rows": [row.data() for row in self.rows],
            "observed": self.observed.plain() if self.observed else None,
            "optimizers": [each.entry() for each in optimizers],
            "run": list(run),
        }
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def compare(seen: Observed, plan: Plan) -> tuple[Row, ...]:
    """Return one row per fact. Does not need torch."""
    rows: list[Row] = []
    for name, row_of in COMPARISONS.items():
        found: Row | list[Row] = []
        if name not in seen.errors:
            with seen.observing(name):
                found = row_of(seen, plan)
        if name in seen.errors:
            found = Row(name, "not observed", ok=None)
        rows += found if isinstance(found, list) else [found]
    rows += _kept(seen, plan)
    rows += [Row(field, f"off: {reason}", "", None) for field, reason in seen.left_out.items()]
    return _with_allowances(rows, plan)


def _kept(seen: Observed, plan: Plan) -> list[Row]:
    """Show the parameters that the script keeps in BF16, as the run allows."""
    if not seen.kept:
        return []
    found = ", ".join(f"{pattern} ({_amount(elements)})" for pattern, elements in seen.kept.items())
    names = "; ".join(str(each) for each in plan.allow if each.kind == BF16 and each.value in seen.kept)
    return [Row("kept in bf16", found, _updated_dtype(seen, plan).short, None, names)]


def _with_allowances(rows: list[Row], plan: Plan) -> tuple[Row, ...]:
    """Return the rows, with those that differ as the plan allows, and a row for what was allowed in vain.

    `unsynchronized` decides about local SGD, which shows between ranks only.
    """
    result: list[Row] = []
    needed: set[Allowance] = set()
    for row in rows:
        allowance = next((each for each in plan.allow if _covers(each, row)), None)
        if allowance is None:
            result.append(row)
        else:
            needed.add(allowance)
            result.append(dataclasses.replace(row, ok=None, allowed=str(allowance)))
    shown = {name for row in rows for name in row.allowed.split("; ")}
    unneeded = [
        str(each) for each in plan.allow if each not in needed and each.kind != LOCAL_SGD and str(each) not in shown
    ]
    return (*result, *([Row("allow", f"not needed: {', '.join(unneeded)}", "", None)] if unneeded else []))


def _covers(allowance: Allowance, row: Row) -> bool:
    """True if a deviation explains that a row differs."""
    if allowance.kind == LOCAL_SGD and row.name == "reduction":
        return row.found == "not observed"
    if row.ok is not False:
        return False
    if allowance.kind == LOSS_SCALING and row.name == "scaler":
        return row.found in {NO_SCALER, BYPASSED} or row.found.endswith(DISABLED)
    return allowance.kind == LOCAL_SGD and row.name == "engine" and row.found == NO_WRAPPER


def unsynchronized(rows: Iterable[Row], failures: list[str], plan: Plan) -> tuple[tuple[Row, ...], list[str]]:
    """Return rows and failures of all ranks where ranks may step without reducing each time: `allow: local_sgd`."""
    rows = tuple(rows)
    if not any(each.kind == LOCAL_SGD for each in plan.allow):
        return rows, failures
    others = [failure for failure in failures if not failure.startswith(NOT_REDUCED)]
    if len(others) < len(failures):
        row = Row("local sgd", "the gradients differ between ranks", "reduced over all", None, LOCAL_SGD)
    elif any(row.allowed == LOCAL_SGD for row in rows):
        return rows, others
    else:
        row = Row("allow", f"not needed: {LOCAL_SGD}", "", None)
    return (*rows, row), others


def failures(rows: Iterable[Row], plan: Plan, seen: Observed) -> list[str]:
    """Return the mismatches as messages; if there are none, the rows that must be observed and could not be."""
    rows = list(rows)
    wrong = [
        f"{row.name}: {row.found}; asked: {row.asked}{_advice(row, plan, seen)}" for row in rows if row.ok is False
    ]
    if wrong or has_failed():
        return wrong
    excused = ("compute",) if seen.inferred else ()  # that operators cannot be recorded must not end a training
    unobserved = [row for row in _missing(rows, plan) if row.name not in excused]
    return [
        f"not proven: {row.name} could not be observed{row.found.removeprefix(UNOBSERVED)}; "
        f"asked: {row.asked}{_advice(row, plan, seen)}"
        for row in unobserved
    ]


def verdict_of(failures: Iterable[str]) -> str:
    """Return `in force`, `not in force`, or `not proven` if the only failures are facts that were not observed."""
    failures = list(failures)
    if not failures:
        return "in force"
    return "not proven" if all("not proven: " in failure for failure in failures) else "not in force"


def _missing(rows: Iterable[Row], plan: Plan) -> list[Row]:
    """Return the rows that must be observed, and were not."""
    if not plan.policy.low_precision:
        return []
    return [row for row in rows if row.name in REQUIRED_ROWS and row.unobserved and not row.allowed]


def verdict_on(rows: Iterable[Row], plan: Plan, failures: Iterable[str]) -> str:
    """Return `verdict_of` the failures; `not proven` if a required row is missing because mpguard's own code failed."""
    verdict = verdict_of(failures)
    return "not proven" if verdict == "in force" and _missing(rows, plan) else verdict


def reduced_by_script(seen: Observed) -> bool:
    """True if the script itself has called collectives that reduced as many elements as there are gradients."""
    return seen.engine == "none" and sum(seen.reductions.values()) >= sum(seen.gradients.values()) > 0


def is_stage(seen: Observed) -> bool:
    """True if this rank passes activations on to others: they compare that each has a part of the model."""
    return seen.engine == "none" and seen.passed_on > 0


def is_unsynchronized(seen: Observed) -> bool:
    """True if this is one of several processes and its gradients are not reduced with those of the others."""
    return seen.world_size > 1 and seen.engine == "none" and not reduced_by_script(seen)


def _advice(row: Row, plan: Plan, seen: Observed) -> str:
    """Return the usual cause of a mismatch and what to do, to be appended to its message."""
    policy, accelerate = plan.policy, "accelerate" in sys.modules
    if row.name == "compute" and not _products(seen, trained=True):
        return (
            ". No matrix product that mpguard recognizes is behind the gradients of this step. Activate mpguard before "
            "the optimizer is created, and train in the same thread"
        )
    if row.name == "compute" and row.unobserved and "CompiledFunction" in row.found:
        return (
            ". No operator runs where a CUDA graph is replayed. Its products are known if the first calls of the "
            "compiled code were looked at, and inductor's cache is on (TORCHINDUCTOR_FX_GRAPH_CACHE is not 0)"
        )
    if row.name == "compute" and row.unobserved:
        return (
            ". Their kernels are no operators of torch, so that their dtype is not known: use operators of torch, or "
            "accept it with --enforce warn"
        )
    if row.name == "compute":
        return _compute_advice(seen, plan)
    if row.name == "attention":
        return ". Cast the queries, keys and values to the policy's dtype, or remove the cast before the attention"
    if row.name == "frozen parts":
        narrower = _by_dtype(_frozen_narrower(seen, plan))
        known = [dtype for dtype in narrower if dtype in QUANTIZED or Dtype.spelled(dtype)]
        accepted = f": mpguard_allow: [{{frozen: {known[0]}}}]" if known else " with --enforce warn"
        return (
            ". What they compute goes into the trained part with less precision than the policy has. Load or cast them "
            f"in {policy.compute_dtype.short} or fp32, or accept it{accepted}"
        )
    if row.name == "reduction" and not seen.reductions:
        return (
            ". No collective with gradients was seen. Run the last backward pass before a step outside no_sync(), or "
            "reduce the gradients with the functions of torch.distributed"
        )
    if row.name == "processes" and seen.world_size == 1 and seen.launched > 1:
        return (
            f". {seen.launched} processes were started without a process group in common, and each trains a model of "
            "its own. Without a GPU set ACCELERATE_USE_CPU=true, or `distributed_type: MULTI_CPU` for `mpguard launch`"
        )
    if row.name == "processes":
        return ". Start as many as the config defines (`mpguard launch` does), or change `num_processes`"
    if (
        row.name == "engine"
        and seen.engine in ("none", "single", "ddp")
        and (plan.strategy or "").startswith(("fsdp", "deepspeed"))
    ):
        return (
            ACCELERATE_ENGINES if accelerate else ". Wrap the model in the engine, or change the engine in the config"
        )
    if row.name == "engine" and seen.engine == "none":
        each = f". {seen.launched} processes each train a model of their own"
        return f"{each}; {ACCELERATE_ON_CPU}" if accelerate else f"{each}: wrap it in DistributedDataParallel"
    if row.name == "scaler" and seen.scaler is not None and seen.unscaled:
        return ". Call backward on the result of scaler.scale(loss), for each loss"
    if row.name == "scaler" and seen.scaler is not None and seen.scaler["enabled"]:
        return (
            ". A GradScaler gets the policy's values only if mpguard is active when it is created: create it after that"
        )
    if row.name == "scaler" and row.found == BYPASSED:
        return (
            ". Step through it: `scaler.step(optimizer)` divides the gradients by the scale, and skips a step that has "
            f"overflowed; then `scaler.update()`. If the script divides them itself: mpguard_allow: [{LOSS_SCALING}]"
        )
    if row.name == "scaler" and policy.fp16:
        return (
            ". FP16 gradients below 6e-8 are lost without loss scaling. Scale the loss with a GradScaler, or use BF16. "
            f"If the script scales the loss itself: mpguard_allow: [{LOSS_SCALING}]"
        )
    if row.name == "accumulation":
        return _accumulation_advice(seen)
    if row.name == "tf32" and row.found != NO_TF32:
        return ". The script, or a library, has set it after mpguard: remove that"
    if row.name == "compile" and policy.low_bit_recipe == "delayed":
        return f". {compilation.NEVER}: compile nothing, or set fp8_recipe to tensorwise"
    if row.name == "compile mode":
        return (
            ". torch combines no mode with `options`, or with a `backend` other than inductor: remove them "
            "(accelerate: dynamo_backend), or set compile_mode to default"
        )
    if row.name == "compile" and policy.compile is True:
        return f". {CALL_THE_MODEL}"
    if row.name == "fp8 products" and not (seen.fp8 and seen.fp8.beside):
        return (
            ". Only Linear layers become FP8. Choose a recipe without FP8, or accept it: mpguard_overrides: "
            "{fp8_required: false}"
        )
    if row.name == "not in fp8":
        return (
            ". Layers that are added to a model after its optimizer was created are not converted: create the "
            "optimizer when the model is complete, or call mpguard.convert before the first step"
        )
    if row.name == "optimizer" and seen.rounded_weights:
        return f". {ROUNDED_WEIGHTS}"
    if row.name == "optimizer" and seen.rounded_states:
        return ". The script rounds the values of the states between the steps: leave them as the step has made them"
    if row.name == "optimizer" and _mostly(seen.masters, policy.master_dtype.short):
        accepted = ", ".join(f"{{states: {dtype}}}" for dtype in _lower_states(seen, plan))
        return (
            ". Create the optimizer with its states in that dtype, use one that keeps them in it, or accept it: "
            f"mpguard_allow: [{accepted}]"
        )
    if row.name == "optimizer" and policy.master_dtype is Dtype.FP32:
        return _load_in_fp32(seen, policy)
    if row.name == "fp8 weights":
        return (
            ". mpguard keeps the exact values only of layers that it converts itself: build them as nn.Linear, without "
            "quantized_model_init, and set fp8_param"
        )
    if row.name == "parameters" and policy.master_dtype is Dtype.FP32 and {"bf16", "fp32"} <= seen.parameters.keys():
        return ". If modules keep theirs in bf16 on purpose, name them: mpguard_allow: [{bf16: PATTERN}]"
    if row.name == "parameters" and policy.script_requirements:
        return f"; {policy.script_requirements}"
    return ""


def _accumulation_advice(seen: Observed) -> str:
    """Return what to do about gradients that are added up in low precision."""
    if seen.engine == "fsdp1":
        return (
            ". FSDP1 adds up in the compute dtype inside no_sync(): reduce each pass, or use FSDP2, which adds in FP32"
        )
    return ". What the small dtype rounds away is lost: add up in FP32 buffers, and cast nothing before the step"


def _load_in_fp32(seen: Observed, policy: Policy) -> str:
    """Return how to have FP32 master weights, or to do without them."""
    advice = ". The optimizer's parameters are the master weights: "
    if seen.cast:
        advice += f"remove the cast ({seen.cast})"
    else:
        advice += (
            "load the model in fp32 (`from_pretrained(NAME, dtype=torch.float32)`: transformers 5 loads a checkpoint "
            "in the dtype it was saved in)"
        )
    if policy.bf16 and not policy.low_bit_recipe and "bf16" in seen.masters:
        return f"{advice}, or train without master weights: recipe bf16_full"
    return advice


def _compute_advice(seen: Observed, plan: Plan) -> str:
    """Return what to do about products in another dtype than the policy's."""
    asked = plan.policy.compute_dtype.short
    products = _products(seen, trained=True)
    if _rounded(seen, plan):
        return ". Something rounds them to that dtype (a hook of saved tensors, a cast in the forward pass): remove it"
    found = _by_dtype(products)
    if asked == "fp32" or (asked not in found and found.keys() & {"bf16", "fp16"}):
        return ". Remove the autocast or the cast there, or choose a policy of that dtype"
    if asked not in found:
        return ". Autocast (or the engine) was not in force around the forward pass: run the forward pass inside it"
    return (
        f". At most {100 * WIDER_SHARE:.0f} % of the products may be in a wider dtype, and none in a narrower one: "
        "enable autocast there (a custom Function or operator must multiply in autocast's dtype, in backward too), "
        f"or accept it{_allow_hint(products, plan)}"
    )


def _allow_hint(products: Iterable[Computed], plan: Plan) -> str:
    """Return how to accept what computes in FP32."""
    wider = [each for each in products if each.dtype == "fp32"]
    named = (each.module for each in wider if each.module)
    module = next((each for each in named if pattern_around(each, plan.policy.fp32_modules) is None), None)
    place = module or next((each.place for each in wider if not each.module), None)
    return f": mpguard_allow: [{{fp32: {place}}}]" if place else " with --enforce warn"


def _engine(seen: Observed, plan: Plan) -> Row:
    names = {"none": "pipeline" if is_stage(seen) else NO_WRAPPER, "single": "single process"}
    found = names.get(seen.engine, seen.engine)
    asked = plan.strategy
    one = asked == "single" or (asked == "ddp" and seen.idle)
    if asked is None or (one and seen.engine in ("single", "ddp") and seen.world_size == 1):
        return Row("engine", found, asked or "", None if asked is None else True)
    if asked == "ddp" and seen.engine == "tp":
        return Row("engine", "tensor parallel", asked, True)
    if asked == "ddp" and is_stage(seen):
        return Row("engine", "pipeline", asked, True)
    if asked == "ddp" and reduced_by_script(seen):
        return Row("engine", "gradients reduced by the script itself", asked, True)
    return Row("engine", found, asked, seen.engine == asked)


def _processes(seen: Observed, plan: Plan) -> Row:
    if seen.idle:
        total = seen.world_size + seen.idle
        found = f"{total}, of which {seen.idle} {'does' if seen.idle == 1 else 'do'} not train"
        names = "; ".join(str(each) for each in plan.allow if each.kind == IDLE_RANKS)
        wrong = plan.processes not in (None, total)
        return Row("processes", found, str(plan.processes or total), False if wrong else None, "" if wrong else names)
    if plan.processes is None:
        ok = None if seen.launched in (1, seen.world_size) else False
        return Row("processes", str(seen.world_size), str(seen.launched), ok)
    return Row("processes", str(seen.world_size), str(plan.processes), seen.world_size == plan.processes)


def _parameters(seen: Observed, plan: Plan) -> Row:
    """Compare the dtypes of the parameters.

    DeepSpeed's engine holds the compute copy; in other engines the model holds the parameters of the optimizer.
    """
    policy = plan.policy
    if not seen.parameters:
        return Row("parameters", "not observed", "", None)
    shards = {"fsdp1": " (sharded)", "fsdp2": " (sharded)"}.get(seen.engine, "")
    asked = policy.params_dtype if seen.engine.startswith("deepspeed") else _updated_dtype(seen, plan)
    assert asked is not None
    elements = sum(seen.parameters.values())
    found = f"{format_counts(seen.parameters)}{shards}, {_amount(elements)}"
    # Parameters kept in FP8 are compared in `_fp8_weights`.
    exact = {dtype: count for dtype, count in seen.parameters.items() if dtype != "fp8"}
    return Row("parameters", found, asked.short, _mostly(exact, asked.short))


def _updated_dtype(seen: Observed, plan: Plan) -> Dtype:
    """Return the dtype that the parameters of an optimizer have, and their gradients."""
    policy = plan.policy
    separate = policy.master_weights == "optimizer" and not seen.engine.startswith(("fsdp", "deepspeed"))
    return policy.compute_dtype if separate else policy.master_dtype


def allowed_dtypes(module: str | None, plan: Plan) -> set[str]:
    """Return the dtypes in which the products of a module may run.

    module: its qualified name; None if it is not known.
    """
    policy = plan.policy
    allowed = {policy.compute_dtype.short}
    if not policy.low_precision:
        allowed |= {"fp64", "complex64", "complex128"}
    if module and pattern_around(module, policy.fp32_modules) is not None:
        allowed |= {"fp32"}
    if policy.low_bit_recipe and not (module and any(fnmatch(module, each) for each in policy.kept_out_of_fp8)):
        allowed |= {"fp8", "fp4"}
    return allowed


def _products(seen: Observed, *, trained: bool, attention: bool = False) -> list[Computed]:
    """Return the products of trained parts or of frozen ones; those of attention, or all others."""
    return [each for each in seen.computed if each.trained == trained and each.attention == attention]


def _by_dtype(products: Iterable[Computed]) -> dict[str, int]:
    """Return the work of products by dtype; those whose dtype is not known are left out."""
    counts: dict[str, int] = {}
    for each in products:
        if each.dtype is not None:
            counts[each.dtype] = counts.get(each.dtype, 0) + each.flops
    return counts


def _narrower(products: Iterable[Computed], plan: Plan) -> list[Computed]:
    """Return the products in a dtype with fewer bits than the policy's, or in the other one of 16 bits."""
    asked = plan.policy.compute_dtype
    return [
        each
        for each in products
        if each.dtype is not None
        and each.dtype not in allowed_dtypes(each.module, plan)
        and (bits(each.dtype) < asked.bits or (bits(each.dtype) == asked.bits and not each.dtype.startswith("complex")))
    ]


def _compute(seen: Observed, plan: Plan) -> Row:
    """Compare the dtypes of the products whose results reach a gradient."""
    asked = plan.policy.compute_dtype.short + (" or fp8" if plan.policy.fp8 else "")
    products = _products(seen, trained=True)
    total = sum(each.flops for each in products)
    if not total and not seen.matrices and seen.passes and not seen.compiled:
        return Row("compute", NO_PRODUCTS, "", None)
    if not total:
        return Row("compute", f"{UNOBSERVED}: {seen.inferred}" if seen.inferred else UNOBSERVED, asked, None)
    others = [each for each in products if each.dtype and each.dtype not in allowed_dtypes(each.module, plan)]
    narrower = _narrower(products, plan)
    islands = _islands(others, plan)
    wider = sum(each.flops for each in others if each not in narrower)
    outside = wider - sum(each.flops for each in islands)
    found = format_counts(_by_dtype(products))
    found += f"; {'; '.join(_where(others))}" if others and len(_by_dtype(products)) > 1 else ""
    limit = (INFERRED_SHARE if seen.inferred else WIDER_SHARE) * total
    if seen.inferred:
        found += f" (inferred from autograd's graph: {seen.inferred})"
    elif seen.looked_at < seen.passes:
        found += f" ({seen.looked_at} of {seen.passes} backward passes looked at)"
    if rounded := _rounded(seen, plan):
        return Row("compute", f"{found}; gradients or saved activations in {', '.join(rounded)}", asked, False)
    if narrower or outside > limit:
        return Row("compute", found, asked, False)
    unknown = [each for each in products if each.dtype is None]
    share = sum(each.flops for each in unknown) / total
    if share > UNKNOWN_SHARE:
        kernels = _names(list(dict.fromkeys(each.place for each in unknown)))
        return Row("compute", f"{UNOBSERVED}: {100 * share:.0f} % of the products, in {kernels}", asked, None)
    if wider > limit:
        return Row("compute", found, asked, None, "; ".join(dict.fromkeys(map(str, islands.values()))))
    return Row("compute", found, asked, True)


def _islands(products: Iterable[Computed], plan: Plan) -> dict[Computed, Allowance]:
    """Return the products in FP32 of modules that the run allows by a pattern, with what allows them."""
    patterns = {each.value: each for each in plan.allow if each.kind == FP32}
    found = {each: _pattern_of(each, patterns) for each in products if each.dtype == "fp32"}
    return {each: patterns[pattern] for each, pattern in found.items() if pattern is not None}


def _pattern_of(product: Computed, patterns: Iterable[str]) -> str | None:
    """Return the pattern that names where products ran: their module, or what the proof calls their place."""
    place = product.module or product.place
    return place if not product.module and place in patterns else pattern_around(product.module or "", patterns)


def _rounded(seen: Observed, plan: Plan) -> list[str]:
    """Return the dtypes narrower than the policy's that gradients or saved activations went through in backward.

    Empty if products ran in a narrower dtype: then their gradients are in it too.
    """
    asked = plan.policy.compute_dtype
    if _narrower(_products(seen, trained=True), plan):
        return []
    least = WIDER_SHARE * sum(seen.gradients.values())
    narrow = {dtype for dtype, elements in seen.widened.items() if elements > least}
    narrow |= {dtype for dtype, elements in seen.rounded_in_backward.items() if elements > min(least, MANY)}
    expected = {asked.short, plan.policy.reduce_dtype.short}  # DDP's hooks run in backward
    expected |= set() if plan.policy.low_bit_recipe is None else {"fp8", "fp4"}
    return sorted(narrow & {"bf16", "fp16", "fp8", "fp4"} - expected)  # integers are masks and indices


def _where(products: Iterable[Computed]) -> list[str]:
    """Return the dtypes of products, each with the places where they ran, the most work first."""
    places: dict[str, dict[str, None]] = {}
    for each in products:
        places.setdefault(each.dtype or "", {})[each.place] = None
    return [f"{dtype}: {_names(list(names))}" for dtype, names in places.items()]


def _attention(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the dtypes of attention. Autocast leaves some of it in FP32, which the model does not choose."""
    products = _products(seen, trained=True, attention=True)
    counts = _by_dtype(products)
    if not counts:
        return []
    narrower = [each for each in _narrower(products, plan) if not _is_fp8_attention(each, plan)]
    found = format_counts(counts)
    found += f"; {'; '.join(_where(narrower))}" if narrower and len(counts) > 1 else ""
    return [Row("attention", found, plan.policy.compute_dtype.short, not narrower)]


def _is_fp8_attention(product: Computed, plan: Plan) -> bool:
    policy = plan.policy
    return product.dtype == "fp8" and (policy.fp8_dot_product_attention or policy.fp8_multi_head_attention)


def _frozen(seen: Observed, plan: Plan) -> list[Row]:
    """Show the products that reach no gradient. Fails if those of a trained model are in a narrower dtype."""
    products = [each for each in seen.computed if not each.trained]
    if not _by_dtype(products):
        return []
    narrower = _frozen_narrower(seen, plan)
    found, asked = _frozen_share(seen, least=0.0), plan.policy.compute_dtype.short
    if not narrower:
        return [Row("frozen parts", found, "", None)]
    found += f"; {'; '.join(_where(narrower))}"
    allowed = {each.value: each for each in plan.allow if each.kind == FROZEN}
    if all(each.dtype in allowed for each in narrower):
        return [Row("frozen parts", found, asked, None, "; ".join(str(allowed[each]) for each in _by_dtype(narrower)))]
    return [Row("frozen parts", found, asked, False)]


def _frozen_narrower(seen: Observed, plan: Plan) -> list[Computed]:
    """Return the products in frozen parts of trained models that are in a narrower dtype than the policy's."""
    return _narrower([each for each in seen.computed if not each.trained and each.inside], plan)


def _frozen_share(seen: Observed, least: float = 0.01) -> str:
    """Return the dtypes of frozen parts and their share: `fp32, 99 % of the products`. Empty below the least share."""
    frozen = sum(each.flops for each in seen.computed if not each.trained)
    share = frozen / max(1, sum(each.flops for each in seen.computed))
    if share <= least:
        return ""
    counts = _by_dtype(each for each in seen.computed if not each.trained)
    return f"{format_counts(counts)}, {format_share(share)} of the products" if counts else ""


def _fp32_modules(seen: Observed) -> list[Row]:
    """Compare what the modules that `fp32_modules` names computed in."""
    fp32 = seen.fp32
    if fp32 is None:
        return []
    name, asked = "fp32 modules", "fp32"
    if fp32.unmatched:
        return [Row(name, f"{', '.join(fp32.unmatched)} matches no module", "a pattern that matches", False)]
    if fp32.left:
        asked = "fp32: add modules to the model before its optimizer is created"
        return [Row(name, f"{_names(fp32.left)} not in fp32", asked, False)]
    counts = [f"{dtype} ({_names(names)})" for dtype, names in fp32.computed.items()]
    if not counts:
        return [Row(name, "not observed", asked, None)]
    low = [dtype for dtype in fp32.weights if dtype in ("bf16", "fp16")]
    found = ", ".join(counts)
    found += f", from weights that {seen.engine} holds in {low[0]}" if low else ""
    found += f"; not called: {_names(fp32.idle)}" if fp32.idle else ""
    return [Row(name, found, asked, not set(fp32.computed) - {"fp32", "fp64"})]


def _fp8(seen: Observed, plan: Plan) -> list[Row]:
    policy, fp8 = plan.policy, seen.fp8
    if policy.low_bit_recipe is None:
        if fp8 is None or fp8.entered is False:
            return []
        return [Row("fp8", f"{len(fp8.converted)} FP8 layers ({fp8.backend})", "none", False)]
    asked = f"{'fp4' if policy.fp4 else 'fp8'} {policy.low_bit_recipe} ({' or '.join(policy.backends)})"
    if fp8 is None:
        ok = False if policy.fp8_required else None
        return [] if "fp8" in seen.left_out else [Row("fp8", "no FP8 module in the model", asked, ok)]
    asked += ", emulated" if policy.fp8_emulate else ""
    wrong = [] if fp8.emulated == policy.fp8_emulate else ["emulation"]
    wrong += ["not the same in every layer"] if fp8.mixed else []
    if fp8.entered is False:
        wrong.append("FP8 autocast not entered around each of them")
    elif fp8.backend in policy.backends and fp8.converted:
        wrong += _other_recipe(fp8, plan)
    found = f"{len(fp8.converted)} of {len(fp8.converted) + len(fp8.left)} Linear ({fp8.backend}"
    found += f" {fp8.recipe['recipe']}" if fp8.recipe else ""
    found += ", emulated)" if fp8.emulated else ")"
    ok = fp8.backend in policy.backends and not wrong
    rows = [Row("fp8", "; ".join([found, *wrong]), asked, ok)]
    if fp8.beside:
        outside = f"{_names(fp8.beside, seen)} multiplied outside of the FP8 layer"
        asked = "each FP8 layer called; or named in fp8_exclude, if other code uses its weight"
        rows.append(Row("fp8 products", outside, asked, False if policy.fp8_required else None))
    else:
        rows.append(_fp8_share(seen, plan))
    rows += _fp8_heads(fp8, plan)
    rows += _fp8_experts(seen, fp8, plan)
    rows += _fp8_weights(fp8, plan)
    rows += _fp8_calibration(seen, fp8, plan)
    rows += _fp8_weight_cache(seen, fp8, plan)
    compute = policy.compute_dtype.short
    explained = [name for name, reason in fp8.left.items() if reason]
    reasons = dict.fromkeys(fp8.left[name] for name in explained)
    if explained:
        rows.append(Row(f"left in {compute}", f"{_names(explained, seen)} ({_names(list(reasons))})", "", None))
    if unexplained := [name for name, reason in fp8.left.items() if not reason]:
        asked = "in fp8, or named in fp8_exclude"
        rows.append(Row("not in fp8", _names(unexplained, seen), asked, False if policy.fp8_required else None))
    if fp8.against:
        rows.append(Row("fp8_exclude", f"{_names(fp8.against, seen)} in fp8", f"left in {compute}", False))
    if fp8.unmatched:
        unmatched = f"{', '.join(fp8.unmatched)} matches no module"
        rows.append(Row("fp8_exclude", unmatched, "a pattern that matches", False))
    return rows


def _fp8_share(seen: Observed, plan: Plan) -> Row:
    """Compare the share of the products that ran in FP8 with the least one that is worth it."""
    name, products = "fp8 products", _products(seen, trained=True)
    counts = _by_dtype(products)
    total = sum(each.flops for each in products)
    if seen.inferred or not counts:
        return Row(name, f"{UNOBSERVED}: {seen.inferred}" if seen.inferred else UNOBSERVED, "", None)
    share = sum(counts.get(dtype, 0) for dtype in ("fp8", "fp4")) / sum(counts.values())
    found = f"{100 * share:.0f} % of the products"
    if share >= LEAST_FP8_SHARE or sum(counts.values()) < (1 - UNKNOWN_SHARE) * total:
        return Row(name, found, "", None)
    others = [each for each in products if each.dtype not in ("fp8", "fp4", None)]
    places = list(dict.fromkeys(each.place for each in others))
    found = f"{format_share(share)} of the products; the others are in {_names(places)}"
    asked = f"at least {100 * LEAST_FP8_SHARE:.0f} %: FP8 saves no time here"
    return Row(name, found, asked, False if plan.policy.fp8_required else None)


def _fp8_heads(fp8: Fp8Layers, plan: Plan) -> list[Row]:
    """Show if the output heads are in FP8, with `fp8_head`."""
    if not plan.policy.fp8_head:
        return []
    taken = dict.fromkeys(fp8.beside, "other code multiplies its weight")
    left = {name: why for name, reason in fp8.heads.items() if (why := reason or taken.get(name))}
    if not fp8.heads:
        return [Row("fp8 head", "no output head in the model", "", None)]
    if not left:
        return [Row("fp8 head", f"{_names(list(fp8.heads))} in fp8", "in fp8", True)]
    reasons = [f"{name}: {reason}" for name, reason in left.items()]
    return [Row("fp8 head", f"left in {plan.policy.compute_dtype.short} ({_names(reasons)})", "", None)]


def _fp8_experts(seen: Observed, fp8: Fp8Layers, plan: Plan) -> list[Row]:
    """Show which experts are in FP8, with `fp8_experts`. Fails if those that should be multiplied in another dtype."""
    if not plan.policy.fp8_experts:
        return []
    name, inside = "fp8 experts", [each for each, reason in fp8.experts.items() if not reason]
    reasons = [f"{each}: {reason}" for each, reason in fp8.experts.items() if reason]
    ran = {each.module: each.dtype for each in sorted(seen.computed, key=lambda each: each.dtype == "fp8")}
    plain = [each for each in inside if ran.get(each, "fp8") not in ("fp8", None)]
    if plain:
        return [Row(name, f"{_names(plain, seen)} multiplied in {plan.policy.compute_dtype.short}", "in fp8", False)]
    if not fp8.experts:
        return [Row(name, "no experts of transformers in the model", "", None)]
    found = [f"{_names(inside, seen)} in fp8 (e4m3, a scale per row)"] if inside else []
    found += [f"left in {plan.policy.compute_dtype.short} ({_names(reasons)})"] if reasons else []
    return [Row(name, "; ".join(found), "" if reasons else "in fp8", None if reasons else True)]


def _fp8_weights(fp8: Fp8Layers, plan: Plan) -> list[Row]:
    """Compare the weights that are kept in FP8, and their masters."""
    policy, layers, kept = plan.policy, len(fp8.converted), sum(fp8.kept.values())
    if not kept and not (policy.fp8_param and fp8.backend == "te" in policy.backends):
        return []
    if not kept and policy.wishes:
        return [Row("fp8 weights", "in high precision", "", None)]
    found = f"{kept} of {layers} kept in FP8 ({', '.join(fp8.kept)})" if kept else "in high precision"
    found += f", masters {format_counts(fp8.masters)}" if fp8.masters else ""
    found += f"; not made from exact weights: {_names(fp8.inexact)}" if fp8.inexact else ""
    if not policy.fp8_param:
        return [Row("fp8 weights", found, "in high precision", False)]
    quantizer = QUANTIZERS[policy.low_bit_recipe or ""]
    ok = fp8.kept == {quantizer: layers} and set(fp8.masters) == {policy.master_dtype.short} and not fp8.inexact
    return [
        Row("fp8 weights", found, f"all kept in FP8 ({quantizer}), exact masters in {policy.master_dtype.short}", ok)
    ]


def _fp8_calibration(seen: Observed, fp8: Fp8Layers, plan: Plan) -> list[Row]:
    """Show which layers began with the scales of their own tensors, with `fp8_calibration`. Fails if one did not."""
    if not plan.policy.fp8_calibration:
        return []
    name, asked = "fp8 calibration", "first scales from the tensors of the first pass, or from a checkpoint"
    if fp8.uncalibrated:
        return [Row(name, f"{_names(fp8.uncalibrated, seen)} not calibrated", asked, False)]
    if not fp8.calibrated:
        return [Row(name, UNOBSERVED, asked, None)]
    return [Row(name, f"{fp8.calibrated} of {len(fp8.converted)} layers", asked, True)]


def _fp8_weight_cache(seen: Observed, fp8: Fp8Layers, plan: Plan) -> list[Row]:
    """Show how often weights were rounded, with `fp8_weight_cache`.

    Fails if that was in each of several passes of a step, or if a copy was not that of its weight.
    """
    if not plan.policy.fp8_weight_cache:
        return []
    name, asked = "fp8 weight cache", "rounded once per step"
    if fp8.stale > STALE_SHARE:
        found = f"{format_share(fp8.stale)} of a copy is not that of its weight"
        asked = "copies of the weights: they were changed between two passes of one step; set fp8_weight_cache to False"
        return [Row(name, found, asked, False)]
    if fp8.uncached:
        found = f"{_names(fp8.uncached, seen)} rounded in each pass"
        return [Row(name, found, f"{asked}, of a model in training mode", False)]
    if not fp8.copies:
        return [Row(name, "no copy is kept", f"{asked}, of a model in training mode", None if fp8.kept else False)]
    times = f"{fp8.passes} {'pass' if fp8.passes == 1 else 'passes'}"
    layers = f"{fp8.copies} of {len(fp8.converted)} layers"
    if fp8.roundings > 1:  # weights that were loaded or changed between two passes, or copies without a transpose
        return [Row(name, f"{layers} rounded {fp8.roundings} times in {times} of a step", asked, None)]
    return [Row(name, f"{layers} rounded once in {times} of a step", asked, True)]


def _other_recipe(fp8: Fp8Layers, plan: Plan) -> list[str]:
    """Return the fields in which the recipe in force differs from the policy's, with both values."""
    if fp8.backend == "torchao":
        asked: dict[str, Any] = {"recipe": plan.policy.fp8_recipe}
        asked |= {FAST_ACCUMULATION: True} if plan.policy.fp8_fast_accum else {}
    else:
        asked = get("te").build_arguments(plan.policy)
    return [
        f"{field} is {fp8.recipe.get(field)}, not {value}"
        for field, value in asked.items()
        if fp8.recipe.get(field) != value
    ]


def _gradients(seen: Observed, plan: Plan) -> Row:
    asked = _updated_dtype(seen, plan).short
    if not seen.gradients:
        return Row("gradients", "not observed", asked, None)
    # Next to masters, gradients of several passes are added up in FP32.
    narrow = any(bits(dtype) < bits(asked) for dtype in seen.gradients)
    ok = not narrow if asked != plan.policy.master_dtype.short else _mostly(seen.gradients, asked)
    return Row("gradients", format_counts(seen.gradients), asked, ok)


def _reduction(seen: Observed, plan: Plan) -> Row:
    """Compare the dtype of the reduction; a wider one than requested is accepted, because it loses nothing."""
    policy = plan.policy
    if seen.world_size == 1:
        return Row("reduction", "none: one process", "", None)
    asked = policy.reduce_dtype
    if seen.averaging:
        return Row("reduction", f"none: weights are averaged ({seen.averaging})", asked.short, None)
    if not seen.reductions and seen.reduced_by == "tensor parallel":
        return Row("reduction", "none: parameters are sharded over all ranks (tensor parallel)", asked.short, None)
    if not seen.reductions and is_stage(seen):
        return Row("reduction", "none: each rank has a part of the model", asked.short, None)
    if not seen.reductions:
        return Row("reduction", "not observed", asked.short, None)
    parts = seen.reductions_over or {"": seen.reductions}
    ok = all(_is_reduced_in(counts, asked) for counts in parts.values())
    if set(parts) == {""}:
        return Row("reduction", f"{format_counts(seen.reductions)} ({seen.reduced_by})", asked.short, ok)
    named = {
        label if not label or label.startswith("by ") else f"over {label}": counts for label, counts in parts.items()
    }
    found = ", ".join(f"{format_counts(counts)} {label}".rstrip() for label, counts in named.items())
    return Row("reduction", f"{found} ({seen.reduced_by})", asked.short, ok)


def _is_reduced_in(counts: Mapping[str, int], asked: Dtype) -> bool:
    """True if at most 1 % of the elements are in a narrower dtype, and none in another one of the same width."""
    narrow = sum(count for dtype, count in counts.items() if bits(dtype) < asked.bits)
    other = any(bits(dtype) == asked.bits and dtype != asked.short for dtype in counts)
    return narrow <= sum(counts.values()) * 0.01 and not other


def _accumulation(seen: Observed, plan: Plan) -> list[Row]:
    """Compare the dtype in which gradients of several backward passes were added up; no row if there were none."""
    policy = plan.policy
    asked = min(policy.reduce_dtype, policy.master_dtype, key=lambda dtype: dtype.bits)
    if not seen.accumulation and not seen.rounded:
        return []
    if not seen.rounded:
        passes = "pass" if seen.accumulated_passes == 1 else "passes"
        found = f"{format_counts(seen.accumulation)}, {seen.accumulated_passes} {passes}"
        return [Row("accumulation", found, asked.short, _is_reduced_in(seen.accumulation, asked))]
    sampled = ", ".join(f"{dtype} in {count} sampled parameters" for dtype, count in seen.rounded.items())
    ok = all(bits(dtype) >= asked.bits for dtype in seen.rounded)
    return [Row("accumulation", f"rounded to {sampled}", asked.short, ok)]


def _coverage(seen: Observed) -> list[Row]:
    """Return what reduces the gradients of the parameters, if it is not one engine; ranks compare the last ones."""
    if set(seen.covered) <= {"ddp", "engine"} or set(seen.covered) == {"script"}:
        return []
    names = {"ddp": "DDP", "engine": "the engine", "script": "the script"}
    by = [f"{_amount(count)} by {names[kind]}" for kind, count in seen.covered.items() if kind in names]
    by += [f"by nothing: {_names(seen.alone, seen)}"] if seen.alone else []
    return [Row("coverage", ", ".join(by), "every trained parameter is reduced", None)]


def _optimizer(seen: Observed, plan: Plan) -> Row:
    asked = plan.policy.master_dtype.short
    if not seen.masters:
        return Row("optimizer", seen.optimizer or "not observed", asked, None)
    rounded_states = "".join(f" rounded to {dtype}" for dtype in seen.rounded_states)
    states = f", states {format_counts(seen.states)}{rounded_states}" if seen.states else ""
    rounded = "".join(f" rounded to {dtype}" for dtype in seen.rounded_weights)
    found = f"{seen.optimizer}, weights {format_counts(seen.masters)}{rounded}{states}"
    lower, allowed = _lower_states(seen, plan), {each.value: each for each in plan.allow if each.kind == STATES}
    same = not ((rounded or rounded_states) and asked == "fp32")
    ok = _mostly(seen.masters, asked) and same and allowed.keys() >= set(lower)
    accepted = "; ".join(str(allowed[dtype]) for dtype in lower) if ok else ""
    shown = ok and (accepted or _quantized_states(seen))
    return Row("optimizer", found, f"weights and states {asked}", None if shown else ok, accepted)


def _lower_states(seen: Observed, plan: Plan) -> list[str]:
    """Return the dtypes of states that are lower than the policy's, without those of quantized states."""
    asked = plan.policy.master_dtype.short
    return [dtype for dtype in seen.states if dtype in ("bf16", "fp16") and dtype != asked]


def _quantized_states(seen: Observed) -> list[str]:
    """Return the formats of quantized states. They are named, and not refused: the script chose that optimizer."""
    return [dtype for dtype in seen.states if Dtype.spelled(dtype) is None]


def _scaler(seen: Observed, plan: Plan) -> list[Row]:
    policy, scaler = plan.policy, seen.scaler
    enabled = scaler is not None and scaler["enabled"]
    if not policy.fp16:
        return [Row("scaler", f"{scaler['kind']}, scale {scaler['scale']:g}", "", None)] if scaler and enabled else []
    asked = "a fixed scale" if policy.loss_scale is not None else "dynamic loss scaling"
    if scaler is None or not enabled:
        none = BYPASSED if seen.scaled and not seen.unscaled else NO_SCALER
        return [Row("scaler", none if scaler is None else f"{scaler['kind']}{DISABLED}", asked, False)]
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
        found, ok = f"{found}; backward ran on a loss that it did not scale", False
    return [Row("scaler", found, asked, ok)]


def _buffers(seen: Observed, plan: Plan) -> list[Row]:
    policy, rows = plan.policy, []
    if policy.buffer_dtype is not None and seen.buffers:
        rows.append(
            Row(
                "buffers",
                format_counts(seen.buffers),
                policy.buffer_dtype.short,
                _mostly(seen.buffers, policy.buffer_dtype.short),
            )
        )
    return rows


def _output(seen: Observed, plan: Plan) -> list[Row]:
    policy = plan.policy
    if policy.output_dtype is None or seen.output is None:
        return []
    return [Row("output", seen.output, policy.output_dtype.short, seen.output == policy.output_dtype.short)]


def _tf32(seen: Observed, plan: Plan) -> list[Row]:
    asked = plan.policy.tf32
    if asked and seen.device == "cpu":
        return [Row("tf32", NO_TF32, "on", False)]
    if asked is None or not seen.fp32_switches:
        return []
    found, ok = tf32.compare(seen.fp32_switches, asked)
    return [Row("tf32", found, "on" if asked else "off", ok)]


def _compile(seen: Observed, plan: Plan) -> list[Row]:
    rows = _compiled_or_not(seen, plan)
    if plan.policy.compile_mode != "default":
        rows.append(_compile_mode(seen, plan.policy.compile_mode))
    return rows


def _compile_mode(seen: Observed, asked: str) -> Row:
    if not seen.compile_modes:
        what = "no model is compiled: set compile to True, or compile the model in the script"
        return Row("compile mode", what, asked, None)
    if compilation.OTHER_MODE in seen.compile_modes:
        return Row("compile mode", compilation.OTHER_MODE, asked, False)
    if seen.compile_modes != [asked]:
        return Row("compile mode", "not known: a model was compiled before mpguard was active, or copied", asked, None)
    if seen.without_cuda_graphs:
        left_out = f"{seen.without_cuda_graphs} of the compiled graphs of this process have no CUDA graph"
        return Row("compile mode", f"{asked}; {left_out} (TORCH_LOGS=cudagraphs says why)", asked, None)
    return Row("compile mode", asked, asked, True)


def _compiled_or_not(seen: Observed, plan: Plan) -> list[Row]:
    policy = plan.policy
    if isinstance(policy.compile, bool):
        found, asked = ("compiled" if each else "not compiled" for each in (seen.compiled, policy.compile))
        return [Row("compile", found, asked, seen.compiled == policy.compile)]
    if policy.low_bit_recipe == "delayed" and seen.compiled_fp8:
        return [Row("compile", "FP8 layers are compiled", "delayed scaling not compiled", False)]
    if policy.low_bit_recipe:
        chosen = compilation.choice(policy)
        lost = f": {chosen.reason}. {CALL_THE_MODEL}" if chosen.on and not seen.compiled else ""
        return [Row("compile", "compiled" if seen.compiled else f"not compiled{lost}", "auto", None)]
    return []


def _attention_masks(seen: Observed) -> list[Row]:
    found = attention_masks.describe(seen.attention_masks)
    return [Row("attention mask", found, ok=None)] if found else []


#: For each row, or group of rows, the function that compares.
COMPARISONS: dict[str, Callable[[Observed, Plan], Row | list[Row]]] = {
    "engine": _engine,
    "processes": _processes,
    "parameters": _parameters,
    "compute": _compute,
    "attention": _attention,
    "frozen parts": _frozen,
    "fp8": _fp8,
    "fp32 modules": lambda seen, _plan: _fp32_modules(seen),
    "gradients": _gradients,
    "accumulation": _accumulation,
    "reduction": _reduction,
    "coverage": lambda seen, _plan: _coverage(seen),
    "optimizer": _optimizer,
    "scaler": _scaler,
    "buffers": _buffers,
    "output": _output,
    "tf32": _tf32,
    "compile": _compile,
    "attention mask": lambda seen, _plan: _attention_masks(seen),
}


def format_counts(counts: Mapping[str, int]) -> str:
    """Return `bf16`, or `bf16 98 %, fp32 2 %`."""
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    if len(ordered) == 1:
        return ordered[0][0]
    return ", ".join(f"{dtype} {format_share(count / total)}" for dtype, count in ordered)


def format_share(share: float) -> str:
    """Return `97.6 %`; `below 0.1 %` or `above 99.9 %` for what is hardly there, or hardly missing."""
    if share < 0.001:
        return "below 0.1 %"
    return "above 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def _mostly(counts: Mapping[str, int], dtype: str) -> bool:
    """True if most elements have a dtype (see `WIDER_ELEMENTS`), and none has a narrower one.

    FP64 counts as FP32: nothing is lost, and products in it are in the row compute.
    """
    total = sum(counts.values())
    narrower = sum(count for other, count in counts.items() if bits(other) < bits(dtype))
    found = counts.get(dtype, 0) + (counts.get("fp64", 0) if dtype == "fp32" else 0)
    return found > total * (1 - WIDER_ELEMENTS) and narrower == 0


def _names(names: Sequence[str], seen: Observed | None = None, most: int = 3) -> str:
    """Return `a, b, c and 4 more`; fewer names if they are long. A name without letters gets its class and model."""
    known = seen.modules if seen is not None else {}
    texts = [f"`{name}` ({known[name]})" if name in known else name for name in names[:most]]
    while len(texts) > 1 and len(", ".join(texts)) > NAMES_WIDTH:
        texts.pop()
    more = f" and {len(names) - len(texts)} more" if len(names) > len(texts) else ""
    return ", ".join(texts) + more


def _amount(elements: int) -> str:
    """Return a number of elements with three digits and a unit: `875 k`, `1.24 B`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if elements >= size:
            return f"{elements / size:.3g} {unit}"
    return str(elements)
