"""What only measures: a file that repeats steps to time them, or inspects gradients, and a Trainer that evaluates."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import api_names, roles
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.records import Call
from mpguard.lint.source.files import NOTEBOOK

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: Profiler markers: a script that contains one only measures.
_PROFILES = lazy_pattern(r"\b(?:emit_nvtx|pyprof|emit_itt)\b")
#: Calls that stop in a debugger.
_DEBUGS = ("set_trace", "breakpoint")
#: Methods of Trainers that evaluate; words in the names of those that train.
_EVALUATES = frozenset({"evaluate", "predict", "validate", "test", "evaluation_loop", "prediction_loop"})
_MAY_TRAIN = lazy_pattern(r"train|fit|search|tune|learn|^run|^start|^step")
#: Names of clocks; words for speed; functions that make noise.
_CLOCK = lazy_pattern(r"(?:^|_)(?:time|time_ns|perf_counter|perf_counter_ns|monotonic|elapsed_time)$")
_SPEED = lazy_pattern(
    r"(?i)\b(?:gflops|tflops|flops|throughput|benchmark|latency|max_memory_allocated)\b|_per_sec|per second|/ ?sec\b"
    r"|\btime per (?:iter|step)|\b(?:iter|iteration|step)s?\.?[ _]time\b"
)
_NOISE = frozenset({"rand", "randn", "randint"})
#: Names of functions that save something; steps of a program that only measures memory.
_SAVES = lazy_pattern(r"^(?:torch_)?save(?!_for_backward)|(?<!load_)state_dict$")
_FEW = 10
#: A list of numbers, of which a loss is no more than a number.
_NUMBERS = lazy_pattern(r"\[[\[\]\d.,\s-]*\]")


class Measures:
    """What a file does only to measure, or to evaluate."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts

    @cached_property
    def only_probes_gradients(self) -> bool:
        """True if the file computes gradients only to inspect them.

        Either all backward passes start from artificial gradients, as in the test of a layer
        (`out.backward(torch.ones_like(out))`), or a few run without data between a profiler's marks, or each of their
        loops stops in a debugger at each step, or the file only measures speed, or they are in cells of a notebook that
        is run by hand, outside of loops and functions.
        """
        calls = self.facts.calls.get("backward", ())
        if not calls or self.facts.calls.get("manual_backward"):
            return False
        if self.only_measures or all(self._starts_from_artificial(call) for call in calls):
            return True
        if all(map(self._is_debugged, calls)):
            return True
        if self.facts.path.endswith(NOTEBOOK) and all(not call.loops and call.scope.kind == "module" for call in calls):
            return True
        if not _PROFILES.search(self.facts.source.text):
            return False
        return not any(
            isinstance(loop, cst.While) or (isinstance(loop, cst.For) and not _only_counts(loop))
            for call in calls
            for loop in call.loops
        )

    def _is_debugged(self, call: Call) -> bool:
        """True if a debugger stops before or after a call, under the same conditions: `pdb.set_trace()` in its loop."""
        stops = (each for name in _DEBUGS for each in self.facts.calls.get(name, ()))
        return any(
            each.scope is call.scope and each.loops == call.loops and not each.guard - call.guard for each in stops
        )

    @cached_property
    def only_measures(self) -> bool:
        """True if the file repeats steps only to measure their speed or memory.

        Either each backward pass is in loops that only count, between two readings of a clock whose difference is
        taken. The batch is made once, or in each step at random, outside of functions of models, nothing gives other
        data, and the file has a word for speed or memory, or the batch is a list of numbers in the code. Or nothing but
        the time is kept of it, or the peak memory of a few steps is read.
        """
        calls = self.facts.calls.get("backward", ())
        if (
            calls
            and not any(map(roles.KEEPS_RESULT.search, self.facts.calls))
            and all(map(self._only_its_time_is_kept, calls))
        ):
            return True
        if not calls:
            return False
        names_speed = _SPEED.search(self.facts.source.text) is not None
        if not any(map(roles.GIVES_DATA.search, self.facts.calls)) and all(
            self._is_timed(call) and (self._on_written_batch(call) or (names_speed and self._on_synthetic_batch(call)))
            for call in calls
        ):
            return True
        return names_speed and not any(map(_SAVES.search, self.facts.calls)) and all(map(self._is_for_memory, calls))

    def _is_for_memory(self, call: Call) -> bool:
        """True if a call is one of a few steps of a new optimizer, before and after which the peak memory is read."""
        near = call.scope.calls
        return (
            any(each.name == "reset_peak_memory_stats" and each.order < call.order for each in near)
            and any(each.name == "max_memory_allocated" and each.order > call.order for each in near)
            and any("optimizer" in self.facts.kinds(each.node, each) for each in near)
            and bool(call.loops)
            and all(_counts_few(loop) for loop in call.loops)
        )

    def _only_its_time_is_kept(self, call: Call) -> bool:
        """True if a loss is read for its backward pass only, and each step is timed."""
        loss = dotted(call.receiver)
        read = [use for use in call.scope.uses.get(loss, ()) if use.path != f"{loss}.backward"]
        clocks = [each for each in call.scope.calls if _CLOCK.search(each.name)]
        return bool(loss) and "." not in loss and not read and any(each.loops == call.loops for each in clocks)

    def _is_timed(self, call: Call) -> bool:
        """True if a clock is read before and after a call, in its function, and the difference is taken."""
        has_events = any(each.name == "elapsed_time" for each in call.scope.calls)  # of torch.cuda
        clocks = [
            each for each in call.scope.calls if _CLOCK.search(each.name) or (has_events and each.name == "record")
        ]
        read = {bound.key for each in clocks if (bound := self.facts.bound_to(each)) is not None}
        taken = has_events or any(
            isinstance(self.facts.parent(use.node), cst.BinaryOperation)
            for key in read
            for use in call.scope.uses.get(key, ())
        )
        return taken and any(c.order < call.order for c in clocks) and any(c.order > call.order for c in clocks)

    def _on_synthetic_batch(self, call: Call) -> bool:
        """True if a call is repeated by counting only, in a function that makes tensors before the loop, or noise."""
        makes = self._tensors_near(call)
        return bool(makes) and all(
            each.order < call.order and (not each.loops or (each.loops == call.loops and each.name in _NOISE))
            for each in makes
        )

    def _on_written_batch(self, call: Call) -> bool:
        """True if a call is repeated by counting only, in a function whose tensors are all lists of numbers."""
        return bool(makes := self._tensors_near(call)) and all(
            each.name == "tensor" and each.positional and _NUMBERS.fullmatch(self.facts.short(each.positional[0]))
            for each in makes
        )

    def _tensors_near(self, call: Call) -> list[Call]:
        """Return what makes tensors in the function of a call that is repeated by counting only."""
        if not call.loops or not all(isinstance(loop, cst.For) and _only_counts(loop) for loop in call.loops):
            return []
        return [
            each
            for name in api_names.TENSOR_MAKERS
            for each in self.facts.calls.get(name, ())
            if each.scope is call.scope and self.facts.called_path(each).startswith("torch.")
        ]

    def _starts_from_artificial(self, call: Call) -> bool:
        """True if a backward pass starts from an artificial or detached gradient."""
        node = call.argument(0, "gradient")
        if isinstance(node, cst.Subscript):
            node = node.value
        if isinstance(node, cst.Name):
            found = self.facts.values.reaching(node.value, call.scope, call.order, call.guard)
            node = found[0].value if len(found) == 1 and found[0].kind == "assign" else None
        return isinstance(node, cst.Call) and (
            dotted(node.func).rsplit(".", 1)[-1] in api_names.TENSOR_MAKERS
            or (isinstance(node.func, cst.Attribute) and node.func.attr.value in ("detach", "clone"))
        )

    def only_evaluates(self, trainer: Call) -> bool:
        """True if a Trainer is created to evaluate: its name is used for that, never to train or in the tree's code."""
        bound = self.facts.bound_to(trainer)
        if bound is None:
            return False
        methods: set[str] = set()
        for place in self.facts.scopes:
            for use in place.uses.get(bound.key.split(".", 1)[0], ()):
                parent = self.facts.parent(use.node)
                if use.path.startswith(f"{bound.key}.") and isinstance(parent, cst.Call) and parent.func is use.node:
                    methods.add(use.path[len(bound.key) + 1 :])
                elif use.path == bound.key:
                    taker = self.facts.call_of(self.facts.parent(parent)) if isinstance(parent, cst.Arg) else None
                    if taker is None or not self.facts.called_path(taker):
                        return False
        return not methods.isdisjoint(_EVALUATES) and not any(map(_MAY_TRAIN.search, methods))


def _only_counts(loop: cst.For) -> bool:
    """True if a loop only counts: `for _ in range(10)`."""
    return isinstance(loop.iter, cst.Call) and dotted(loop.iter.func) in ("range", "trange")


def _counts_few(loop: cst.CSTNode) -> bool:
    """True if a loop counts to a small literal: `for _ in range(3)`."""
    if not isinstance(loop, cst.For) or not isinstance(loop.iter, cst.Call) or not _only_counts(loop):
        return False
    last = constant(loop.iter.args[-1].value) if loop.iter.args else None
    return last is not None and isinstance(last[0], int) and last[0] <= _FEW
