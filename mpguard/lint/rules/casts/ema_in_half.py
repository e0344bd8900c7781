from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Good,
    Note,
    Rule,
    Scope,
    any_of,
    compatible,
    dotted,
    dtype_triggers,
    lattice,
    lazy_pattern,
    library_names,
    text_of,
)

#: Names of classes that keep an average of a model.
_CLASS = lazy_pattern(r"EMA|Ema|MovingAverage")
_EMA = lazy_pattern(r"(?i)(?:^|_)(?:m?ema|averaged?|shadow)(?:_|$)|(?:model|params?|weights?|net|unet)ema$")
#: Classes that keep an average of the model that is passed to them.
_CLASSES = frozenset(
    {"AveragedModel", "ExponentialMovingAverage", "EMAModel", "ModelEma", "ModelEmaV2", "ModelEMA", "EMA"}
)
#: Code that trains parts of a model again after it was frozen.
_THAWS = lazy_pattern(r"requires_grad_\(\s*(?:True\s*)?\)|requires_grad\s*=\s*True")
_UPDATES = frozenset({"lerp_", "mul_", "lerp", "update", "update_parameters", "step_ema", "ema_update", "update_ema"})
#: Functions that move an average towards the model, and those that only read one.
_AVERAGES = lazy_pattern(r"(?i)ema(?![a-z])|averag|accumulate")
_WIDENS = lazy_pattern(r"\.float\(|float32|\.double\(")
_ONLY_READS = lazy_pattern(r"(?i)save|load|eval|valid|test|sample|log|print|export|grad|freeze|copy|parallel")


class EmaInHalf(Rule):
    """An exponential moving average of weights is kept in FP16 or BF16.

    ## What it does
    Reports a cast of a model, or of the tensors of a dict or list, whose name marks it as an average (`ema`, `shadow`)
    and which the file updates, itself or with a function that averages (`update_ema(ema, model)`); a copy of a model
    that is cast and updated from that model in a loop over their parameters (`mul_`, `lerp_`); and a model that is cast
    to, or loaded in, such a dtype before it is passed to `AveragedModel`, `EMAModel` and the like.

    ## Why is this bad
    Each step adds (1 - decay) times a difference. With decay 0.999 that is less than half of BF16's last bit (2^-9): an
    average of 1.0 that follows weights of 2.0 is still 1.0 after 1,000 steps, where FP32 is at 1.63 (torch 2.13). FP16
    lags as well (1.46).

    ## Known limits
    Other averages are not recognized. A copy that is cast for a checkpoint (`deepcopy(ema).half()`) or
    for inference is not reported, nor is an average that nothing in the file updates, or of a frozen model.
    """

    code, name = "MPG109", "ema-in-half"
    severity = "warning"
    message = "the moving average `{ema}` is kept in {dtype}: its updates are rounded away"
    help = "keep the average in FP32"
    triggers = (
        any_of(
            b"_ema",
            b"ema_",
            b"ema.",
            b"ema ",
            b"EMA",
            b"Ema",
            b"shadow",
            b"AveragedModel",
            b"averaged",
            b"ExponentialMovingAverage",
            b"deepcopy",
        ),
        any_of(*dtype_triggers.CASTS_LOW_PRECISION, b": torch.bfloat16", b": torch.float16", b": torch.half"),
        any_of(b"lerp", b"mul_(", b"copy_(", b"update", b"step_ema", b"EMA", b"Ema", b"Average"),
    )  # fmt: skip
    examples = (
        Bad(
            """\
import torch
from diffusers import UNet2DConditionModel
from diffusers.training_utils import EMAModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

def main(args, loader):
    unet = UNet2DConditionModel.from_pretrained(args.name).cuda()
    averaged = UNet2DConditionModel.from_pretrained(args.name, torch_dtype=DTYPES[args.dtype]).cuda()  # !
    ema = EMAModel(averaged.parameters(), decay=0.9999)
    optimizer = torch.optim.AdamW(unet.parameters())
    for x in loader:
        unet(x).mean().backward()
        optimizer.step()
        ema.step(unet.parameters())
"""
        ),
        Good(
            """\
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.training_utils import EMAModel

def main(args, loader):
    vae = AutoencoderKL.from_pretrained(args.name, torch_dtype=torch.bfloat16).cuda()
    unet = UNet2DConditionModel.from_pretrained(args.name).cuda()
    ema_unet = UNet2DConditionModel.from_pretrained(args.name)
    ema = EMAModel(ema_unet.parameters(), decay=0.9999)
    optimizer = torch.optim.AdamW(unet.parameters())
    for x in loader:
        unet(vae.encode(x)).mean().backward()
        optimizer.step()
        ema.step(unet.parameters())

def sample(args):
    ema_unet = UNet2DConditionModel.from_pretrained(args.name, subfolder="ema", torch_dtype=torch.bfloat16)
    return ema_unet(args.noise)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        reported: set[object] = set()  # one for a statement that loads and casts
        for cast in [*facts.events("cast"), *facts.events("load")]:
            # BF16 first: it loses larger updates of the average.
            low = next((dtype for dtype in reversed(HALF_DTYPES) if cast.may_be(dtype)), None)
            if low is None or facts.is_inference(cast.call):
                continue
            ema, averaging = self._average(cast), self._averaging_call(cast, facts)
            if averaging is not None and low is Dtype.FP16 and cast.kind == "cast" and _is_optimized(cast, facts):
                continue  # MPG101 reports FP16 weights that an optimizer takes; their average is FP16 with them
            is_frozen = averaging is not None and facts.frozen_params.is_frozen_name(cast.key)
            if is_frozen and not self._thaws_parts(cast.key, facts):
                continue  # nothing updates the model, so its average never moves
            names = self._names(ema, cast) if ema else ()
            if (
                averaging is not None
                or any(self._updated(each, cast, facts) for each in names)
                or (self._copy_updated(cast, facts))
            ):
                notes = (
                    (Note("averaged here", averaging.span, facts.elsewhere(averaging)),)
                    if averaging is not None
                    else ()
                )
                if cast.call.statement in reported:
                    continue
                reported.add(cast.call.statement)
                yield self.at(cast, ema=ema or facts.short(cast.subject), dtype=low.label, notes=notes)

    def _thaws_parts(self, key: str, facts: Facts) -> bool:
        """True if code may train parts of a frozen model again: it goes through them, and sets `requires_grad`."""
        parts = re.compile(rf"\bin {re.escape(key)}\.(?:named_)?(?:parameters|modules)\(")
        return parts.search(facts.file_text) is not None and _THAWS.search(facts.file_text) is not None

    def _average(self, cast: Event) -> str:
        """Return the name of the average that is cast in place or that a cast creates; empty if there is none."""
        if cast.call.is_statement:
            return cast.key if _EMA.search(cast.key.rsplit(".", 1)[-1]) else ""
        node: cst.CSTNode = cast.call.node
        statement = cast.call.statement
        if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
            return ""
        value, target = statement.value, statement.targets[0].target
        key = dotted(target.value if isinstance(target, cst.Subscript) else target)
        if not _EMA.search(key.rsplit(".", 1)[-1]) and not self._copied_into_average(key, cast):
            return ""
        if isinstance(value, (cst.DictComp, cst.ListComp)):
            value = value.value if isinstance(value, cst.DictComp) else value.elt
        copied = cast.subject.args if isinstance(cast.subject, cst.Call) else ()
        if any(_EMA.search(dotted(arg.value).rsplit(".", 1)[-1]) for arg in copied):
            return ""  # a copy of the average, for a checkpoint
        while value is not node:  # methods after the cast that return the model: `.cuda().eval()`
            if not isinstance(value, cst.Call) or not isinstance(value.func, cst.Attribute):
                return ""
            if value.func.attr.value not in library_names.SAME - {"float", "double"}:
                return ""
            value = value.func.value
        return key

    def _copied_into_average(self, key: str, cast: Event) -> bool:
        """True for an attribute of a class that is named after an average, if a copy of the model is cast."""
        owner = cast.scope.owner
        copied = isinstance(cast.subject, cst.Call) and dotted(cast.subject.func).endswith("deepcopy")
        return copied and key.startswith("self.") and owner is not None and bool(_CLASS.search(owner.name))

    def _names(self, ema: str, cast: Event) -> list[str]:
        """Return the name of the average and those of its parts: `self.ema = self.ema_model.module`."""
        scope = cast.scope
        parts = [
            key
            for key, bindings in scope.bindings.items()
            for each in bindings
            for value in ([each.value.body, each.value.orelse] if isinstance(each.value, cst.IfExp) else [each.value])
            if each.order > cast.order and dotted(value).startswith((f"{ema}.module", f"{ema}.model"))
        ]
        return list(dict.fromkeys([ema, *parts]))

    def _averaging_call(self, cast: Event, facts: Facts) -> Call | None:
        """Return the call that creates the average from the model in its low dtype."""
        for name in _CLASSES:
            for call in facts.calls.get(name, ()):
                made = [each.atom for each in facts.evaluate(call.func, call)]
                texts = [text_of(atom.scope.node) for atom in made if isinstance(atom, lattice.Class)]
                if any(map(_WIDENS.search, texts)) or (texts and _is_trained(cast, facts)):
                    continue  # a class of the project: `EmaOfHalfModel` reports those of models that are trained
                own = call.argument(None, "dtype")  # the dtype of the average, instead of the model's
                if own is not None and all(dtype in (Dtype.FP32, Dtype.FP64) for _, dtype in facts.dtypes(own, call)):
                    continue
                given = call.argument(0, "model", "parameters")
                inside = given is not None and given is cast.call.node
                key = self._loaded(cast) if cast.kind == "load" else cast.key if cast.call.is_statement else ""
                before = (
                    bool(key)
                    and given is not None
                    and key in (dotted(given), text_of(given).removesuffix(".parameters()"))
                    and call.scope is cast.scope
                    and call.order > cast.order
                    and compatible(call.guard, cast.guard)
                )
                if inside or before:
                    return call
        return None

    def _loaded(self, load: Event) -> str:
        """Return the name of a model that is loaded, also with methods after the loader: `.cuda().eval()`."""
        statement = load.call.statement
        return dotted(statement.targets[0].target) if isinstance(statement, cst.Assign) else ""

    def _updated(self, ema: str, cast: Event, facts: Facts) -> bool:
        """True if the file updates the average after the cast: with a method, or through its parameters."""
        if self._elements_updated(ema, facts) or self._passed_to_update(ema, facts):
            return True
        if self._state_updated(ema, cast, facts):
            return True
        if not any(name in facts.calls for name in _UPDATES) and not any(map(_assigned_averages, facts.scopes)):
            return False
        wanted = {f"{ema}.{name}" for name in _UPDATES | {"parameters", "named_parameters"}}
        if ema.startswith("self."):
            own, given = list(cast.scope.owner.descendants()) if cast.scope.owner is not None else [], []
        else:
            own = list(cast.scope.descendants())
            taking = (each for each in facts.scopes if any(param.name == ema for param in each.params))
            given = [each for each in taking if each not in own and self._is_given(ema, each, facts)]
        if any(_moves_parameters(ema, scope) for scope in given):
            return True
        for scope in own:
            # often without gradients
            averages = any(call.name in ("mul_", "lerp_") for call in scope.calls) or bool(_assigned_averages(scope))
            for use in scope.uses.get(ema.split(".", 1)[0], ()):
                if use.path not in wanted or (facts.is_inference(use) and not averages):
                    continue
                if scope is not cast.scope or use.order > cast.order or set(use.loops) & set(cast.call.loops):
                    return True
        return False

    def _is_given(self, ema: str, function: Scope, facts: Facts) -> bool:
        """True if a call of a function gives it the average for its parameter of the same name."""
        return any(
            dotted(facts.argument_for(call, param)) == ema
            for param in function.bindings.get(ema, ())
            if param.kind == "param"
            for call in facts.callers(function)
        )

    def _passed_to_update(self, ema: str, facts: Facts) -> bool:
        """True if a function that averages takes the average and another object: `update_ema(ema, model.module)`."""
        for name, calls in facts.calls.items():
            if not _AVERAGES.search(name) or _ONLY_READS.search(name):
                continue
            for call in calls:
                given = [dotted(each) for each in (*call.positional, *call.keywords.values())]
                if ema in given and any(each and each != ema for each in given):
                    return True
        return False

    def _state_updated(self, ema: str, cast: Event, facts: Facts) -> bool:
        """True if a function of the file changes the state of the average in place."""
        places = cast.scope.owner.descendants() if ema.startswith("self.") and cast.scope.owner else facts.scopes
        for scope in places:
            reads = any(use.path == f"{ema}.state_dict" for use in scope.uses.get(ema.split(".", 1)[0], ()))
            if reads and any(call.name in ("mul_", "lerp_", "copy_") for call in scope.calls):
                return True
            scaled = (each for bound in scope.bindings.values() for each in bound if each.kind == "augmented")
            if reads and any(
                isinstance(getattr(each.statement, "operator", None), cst.MultiplyAssign) for each in scaled
            ):
                return True
        return False

    def _elements_updated(self, ema: str, facts: Facts) -> bool:
        """True if the file updates the elements of a dict: `ema[n].mul_(...)`, `ema[n] = decay * ema[n] + ...`."""
        changed = (call for name in ("mul_", "lerp_") for call in facts.calls.get(name, ()))
        if any(text_of(call.receiver).startswith(f"{ema}[") for call in changed if call.receiver is not None):
            return True
        return any(
            binding.kind == "item" and binding.value is not None and f"{ema}[" in text_of(binding.value)
            for scope in facts.scopes
            for binding in scope.bindings.get(ema, ())
        )

    def _copy_updated(self, cast: Event, facts: Facts) -> bool:
        """True if a copy of a model is cast, and its parameters are moved towards those of the model in a loop."""
        copied, statement = cast.subject, cast.call.statement
        if not isinstance(copied, cst.Call) or not dotted(copied.func).endswith("deepcopy") or not copied.args:
            return False
        if not isinstance(statement, cst.Assign) or statement.value is not cast.call.node:
            return False
        model, key = dotted(copied.args[0].value), dotted(statement.targets[0].target)
        for zipped in facts.calls.get("zip", ()):
            given = [dotted(each.func) for each in zipped.positional if isinstance(each, cst.Call)]
            loop = facts.parent(zipped.node)
            if key and model and given == [f"{key}.parameters", f"{model}.parameters"] and isinstance(loop, cst.For):
                return any(loop in call.loops for name in ("mul_", "lerp_") for call in facts.calls.get(name, ()))
        return False


def _assigned_averages(scope: Scope) -> list[str]:
    """Return what a function assigns an average to: `p.data = decay * p.data + (1 - decay) * q.data`."""
    return [
        key
        for key, bound in scope.bindings.items()
        for each in bound
        if key.endswith(".data")
        and isinstance(each.value, cst.BinaryOperation)
        and re.search(rf"\*\s*{re.escape(key)}\b|\b{re.escape(key)}\s*\*", text_of(each.value))
    ]


def _moves_parameters(ema: str, scope: Scope) -> bool:
    """True if a function changes parameters of the average in place, or assigns averages to them."""
    taken = re.compile(rf"\b{re.escape(ema)}\.(?:(?:named_)?parameters|state_dict)\(")
    names = {
        key
        for key, bound in scope.bindings.items()
        for each in bound
        if each.value is not None and taken.search(text_of(each.value))
    }
    in_place = [text_of(call.receiver) for call in scope.calls if call.name in ("mul_", "lerp_") and call.receiver]
    return any(re.split(r"\W", each, maxsplit=1)[0] in names for each in (*in_place, *_assigned_averages(scope)))


def _is_trained(cast: Event, facts: Facts) -> bool:
    """True if the weights of an event are trained in BF16."""
    return any(each.event is cast for each in facts.training_use.weights(Dtype.BF16))


def _is_optimized(cast: Event, facts: Facts) -> bool:
    """True if an optimizer takes the FP16 weights that a cast makes."""
    weights = (each for each in facts.training_use.weights(Dtype.FP16) if each.event is cast)
    return any(facts.optimizers.plain(each.training) for each in weights)
