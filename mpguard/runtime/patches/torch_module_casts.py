"""Record casts, loads and evaluations of modules."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import casts
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks, master_weights
from mpguard.runtime.proof.observe import name_of
from mpguard.runtime.proof.profiler import muted


@patch(
    "torch.nn.modules.module:Module.load_state_dict",
    needs=("state_dict",),
    reason="weights may be loaded before the optimizer is created, so before the conversion: their FP8 history "
    "is kept; the dtypes that were saved are reported",
    lost="a resumed run is not proven again after its checkpoint was loaded",
    check=checks.module,
)
def _module_load_state_dict(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.plan.policy.low_bit_recipe == "delayed":
            from mpguard.nn.fp8 import amax_history

            amax_history.store_pending(self, state_dict)
        trained = guard.trained_parameters() if guard is not None else {}
        before = casts.dtypes(self) if trained or (guard is not None and kwargs.get("assign")) else {}
        result = original(self, state_dict, *args, **kwargs)
        if guard is not None:
            master_weights.load(guard, self, state_dict)
            guard.observing_load(lambda: guard.loaded.weights(self, state_dict))
            guard.weights_loaded(self)
            if narrowed := casts.narrowed(self, before):
                _record_narrowed(guard, self, narrowed, f"{casts.caller()[1]}: load_state_dict(assign=True)")
            for optimizer in {trained[key] for key in casts.replaced(before, self) & trained.keys()}:
                _, place = casts.caller()
                name = name_of(optimizer)
                what = f"{place}: load_state_dict(assign=True) replaces the parameters of {name} in the model"
                guard.weights_cast(optimizer, what, casts.REPLACED_ADVICE)
        return result

    return load_state_dict


def _record_narrowed(guard: guards.Guard, module: Any, narrowed: dict[int, tuple[str, str]], call: str) -> None:
    """Record the dtypes to which a call has cast parameters of a module. narrowed: see `casts.narrowed`."""
    for new in {new for _, new in narrowed.values()}:
        guard.recorder.casts.setdefault((call, new), weakref.WeakSet()).add(module)


@patch(
    "torch.nn.modules.module:Module._apply",
    needs=("fn",),
    reason="`model.half()` after the proof: the cast is reported, and training on with the rounded weights is refused",
    lost="a cast of the model after the proof is found late, and without its place",
    check=checks.module,
)
def _module_apply(original: AnyFunction) -> AnyFunction:
    inside = False  # it calls itself for the children of a module

    @functools.wraps(original)
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        guard = guards.current()
        if guard is None or inside:
            return original(self, *args, **kwargs)
        trained = guard.trained_parameters()
        before = casts.dtypes(self)
        inside = True
        try:
            with muted():  # copies that are cast for an export are no part of the step; trained ones are reported
                result = original(self, *args, **kwargs)
        finally:
            inside = False
        narrowed = casts.narrowed(self, before)
        method, place = casts.caller() if narrowed else ("", "")
        _record_narrowed(guard, self, narrowed, f"{place}: {method}()")
        for optimizer, (old, new) in {
            trained[key]: change for key, change in narrowed.items() if key in trained
        }.items():
            name = name_of(optimizer)
            guard.weights_cast(optimizer, f"{place}: {method}() casts the weights of {name} from {old} to {new}")
        return result

    return _apply


@patch(
    "torch.nn.modules.module:Module.eval",
    needs=("self",),
    reason="code that evaluates may leave another precision behind: a step after it is checked",
    lost="a step after an evaluation is not checked again",
    check=checks.module,
)
def _eval(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def eval(self: Any) -> Any:
        guard = guards.current()
        if guard is not None and self.training:
            guard.switch_to_evaluation()
        return original(self)

    return eval
