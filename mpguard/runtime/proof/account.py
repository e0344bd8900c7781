"""`StepAccount`: which products ran between two applied steps of an optimizer, in which dtype, and for what.

torch's profiler records the operators with their operands' dtypes and shapes while a step is looked at; nothing is put
between the program and its operators. The profiler is stopped and started again after each backward pass, so that
memory is bounded by one pass. A profiler of the program's own has precedence.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.runtime.containment import contained_hook
from mpguard.runtime.proof import trace
from mpguard.runtime.proof.inferred import Inferred
from mpguard.runtime.proof.trace import GraphNode, OperatorTrace, Overflow, Unaligned, Work
from mpguard.runtime.ranks import is_forked_after_cuda

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Backward passes before an applied step of which each one is looked at; of later ones those with number 2**n.
EACH_PASS = 16

#: Calls of modules without a backward pass after which the events are read. Then calls without gradients are no longer
#: recorded, so that a long evaluation before the first step costs neither memory nor time.
LONG_CALLS = 5_000

#: Nodes of autograd's graph whose modules are remembered for backward passes that come later.
REMEMBERED_NODES = 200_000

#: The module that inductor imports to record CUDA graphs.
CUDA_GRAPHS = "torch._inductor.cudagraph_trees"

#: The variable with which Kineto prints no lines when it starts and stops.
QUIET = ("KINETO_LOG_LEVEL", "99")

#: The level of errors in torch's C++ code (`c10/util/Logging.h`).
ERROR = 2


@dataclasses.dataclass
class Products:
    """The products of a step. FLOPs by place.

    trained: their results reach a gradient. frozen: they do not. passes: backward passes, looked_at: of them.
    reason: why the operators could not be recorded (then `trained` and `frozen` are empty); empty if they were.
    inferred: what autograd's graph implies. called: the classes of the modules that were called, by id; None if calls
    were not observed. unscaled, scaled: True if a loss was not scaled by a GradScaler, and if one was. converted:
    elements that were copied to another dtype in backward, by the dtypes before and after. overflows, unaligned: what
    cannot be right in any policy, see `trace`.
    """

    trained: Counter[Work] = dataclasses.field(default_factory=Counter)
    frozen: Counter[Work] = dataclasses.field(default_factory=Counter)
    passes: int = 0
    looked_at: int = 0
    reason: str = ""
    inferred: Inferred = dataclasses.field(default_factory=Inferred)
    called: dict[int, str] | None = None
    unscaled: bool = False
    scaled: bool = False
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    overflows: set[Overflow] = dataclasses.field(default_factory=set)
    unaligned: set[Unaligned] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Pass:
    """A backward pass with the forward passes that belong to it.

    inferred: what its graph implies. number: it is the n-th that ended. missed: True if it should have been looked at.
    """

    inferred: Inferred
    number: int = 0
    accumulates: bool = True
    scaled: bool = False
    looked_at: bool = False
    missed: bool = True
    trained: Counter[Work] = dataclasses.field(default_factory=Counter)
    frozen: Counter[Work] = dataclasses.field(default_factory=Counter)
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)


class StepAccount:
    """Records the products of a process from `start` until `stop`.

    active: True between `start` and `stop`. running: True while the profiler runs for it. reason: why it cannot record;
    empty if it can. overflows: numbers that did not fit the dtype of a tensor.
    """

    def __init__(self, previous: StepAccount | None = None) -> None:
        """Create an account. previous: the one before, whose limits hold on."""
        self.active = self.running = False
        self.reason: str = "" if previous is None else previous.reason
        self.weights: set[tuple[int, ...]] = set() if previous is None else previous.weights
        self.graphs: trace.CompiledGraphs = trace.CompiledGraphs() if previous is None else previous.graphs
        self.te_dtype: str | None = None
        #: Hooks of modules; None if compiled code is in use, which must not see them.
        named = previous is None or previous._ranges is not None
        self._ranges: ModuleRanges | None = ModuleRanges(self._called) if named else None
        #: True if a range of the program was open when the profiler stopped: see `_cut`.
        self._blocked: bool = previous is not None and previous._blocked
        self._thread = 0
        self._open: _Pass | None = None if previous is None else previous._open  # the backward pass that runs
        self._seconds = 0.0
        self._resume = False  # after the optimizer's step
        self._calls = 0  # of modules, since the profiler started
        self._paused = False  # until a module is called with gradients
        self._forget()

    def _forget(self) -> None:
        """Forget what was recorded."""
        self._number = 0
        self._gave_way = False
        self._passes: list[_Pass] = []
        self._pending: list[tuple[Work, frozenset[GraphNode], int]] = []
        self._frozen: Counter[Work] = Counter()
        self._origins: list[dict[GraphNode, Work]] = []
        self._opaque: dict[GraphNode, tuple[Work, int]] = {}
        self._applied: set[int] = set()
        self.overflows: set[Overflow] = set()
        self._unaligned: set[Unaligned] = set()
        self._ended = 0
        self._begun: dict[int, int] = {}  # passes that had ended when the step began, by the id of a parameter

    # -- the profiler ------------------------------------------------------------------------

    def start(self) -> None:
        """Start to record, where a step begins. Does nothing if another profiler runs, or after a failure.

        While the range of an optimizer's step is open that was open when a profiler stopped, it starts in `resume`.
        """
        self.active = True
        if self.running or self.reason or self._blocked:
            return
        if _steps.cut:
            self._resume = True
            return
        self._calls, self._paused = 0, False
        with self._reporting_failures():
            self.running = _enable_profiler()
            self._thread = threading.get_ident()
            if self.running and self._ranges is not None:
                self._ranges.install()

    def stop(self) -> None:
        """Stop to record, and remove the hooks. What was recorded remains."""
        self.active = self._resume = self._paused = False
        if self._ranges is not None:
            self._ranges.remove()
        if self.running:
            self._cut(resume=False)

    def abandon(self) -> None:
        """Record nothing more in a fork, and leave the profiler alone: it is the parent's."""
        self.active = self.running = self._resume = self._paused = False
        if self._ranges is not None:
            self._ranges.forget()

    def restart(self) -> None:
        """Forget what was recorded, and record the next step from `resume`."""
        self.stop()
        self._forget()
        self.active = self._resume = True

    def resume(self) -> None:
        """Record on after the step of an optimizer, whose range must have been closed."""
        if self._resume and self._open is None and not _steps.cut:
            self._resume = False
            self.start()

    def give_way(self) -> None:
        """Stop in favour of a profiler of the program; what was not recorded yet is lost."""
        if self.running:
            self.stop()
            self.active = self._gave_way = True

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Record nothing in a block that exchanges tensors: the profiler has weak references to those it has seen."""
        found = self._cut(resume=False)
        try:
            yield
        finally:
            if found is not None:
                self._remember(found)
                self.start()

    def tensors_are_exchanged(self) -> None:
        """Record nothing until a module is called: the profiler has weak references to the tensors it has seen.

        torch refuses to exchange such tensors. Without hooks of modules it records on at once.
        """
        if not self.running:
            return
        self._remember(self._cut(resume=False) or OperatorTrace())
        self._paused = self._ranges is not None
        if not self._paused:
            self.start()

    def enter_compiled_code(self) -> None:
        """Remove the hooks of modules before compiled code runs: dynamo would trace them, or compile again."""
        if self._ranges is not None:
            self._ranges.remove()
            self._ranges = None
        self._called(outermost=True)

    def _called(self, *, outermost: bool) -> None:
        """Count the call of a module, and read the events after `LONG_CALLS`. outermost: no module calls it."""
        self._calls += 1
        if not outermost or self._open is not None or threading.get_ident() != self._thread:
            return
        if self._paused and _gradients_enabled():
            self.start()
        elif self.running and self._calls > LONG_CALLS:
            self._paused = not _gradients_enabled()
            self._calls = 0
            self._remember(self._cut(resume=not self._paused) or OperatorTrace())

    def range_without_data(self) -> contextlib.AbstractContextManager[Any]:
        """Return a range for operators on fake tensors, which are no part of the training."""
        return trace.outside() if self.running else contextlib.nullcontext()

    @contextlib.contextmanager
    def _reporting_failures(self) -> Any:
        """Turn an error of the profiler into the reason why nothing is observed: it must not end the training."""
        try:
            yield
        except Exception as error:
            self.running = False
            self.reason = f"torch's profiler failed: {type(error).__name__}: {error}"

    def _cut(self, *, resume: bool) -> OperatorTrace | None:
        """Return what ran since the last cut; None if the profiler does not run. resume: True to record on.

        A range that is open when the profiler stops must be closed before the profiler starts again: it holds a pointer
        into the events of the first. Ranges of modules are closed here; the program's own prevent another start.
        """
        if not self.running:
            return None
        self.running = False
        began = time.monotonic()
        with self._reporting_failures():
            if threading.get_ident() != self._thread:
                _left_running.add(self._thread)
                raise RuntimeError("the training runs in another thread than the one that created the optimizer")
            opened = self._ranges.close() if self._ranges is not None else []
            events, unfinished, begun = _disable_profiler()
            self._blocked = any(not name.startswith(trace.IGNORED) for name in unfinished)
            _steps.cut = bool(unfinished)
            closures = frozenset(begun if resume else ())
            graphs = self.graphs if CUDA_GRAPHS in sys.modules else None
            found = trace.read(events, self.weights, self.te_dtype, closures, graphs)
            if resume and not unfinished:
                self.running = _enable_profiler()
                if self._ranges is not None:
                    self._ranges.reopen(opened)
            self._resume |= resume and _steps.cut and not self._blocked
            self._seconds += time.monotonic() - began
            return found
        return None

    def take_seconds(self) -> float:
        """Return for how long events were read since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _wanted(self) -> bool:
        """True if the next backward pass is to be looked at."""
        following = self._number + 1
        return following <= EACH_PASS or following & (following - 1) == 0

    # -- passes ------------------------------------------------------------------------------

    def begin_pass(self, inferred: Inferred, optimizers: Iterable[Any]) -> None:
        """Record that a backward pass begins: earlier ones whose gradients were thrown away do not count.

        inferred: what its graph implies.
        """
        self._open = _Pass(inferred)
        known: dict[int, bool] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                known.update((id(own), own.grad is not None or id(own) in self._applied) for own in group["params"])
        self._passes = [each for each in self._passes if _still_counts(each, known)]

    def end_pass(self, accumulates: bool, *, scaled: bool = False) -> None:
        """Record that the backward pass has ended.

        accumulates: True if it has added to `.grad` of leaves. scaled: True if a GradScaler has scaled its loss.
        """
        assert self._open is not None
        ended, self._open, wanted = self._open, None, self._wanted()
        self._calls = 0
        self._number += accumulates
        found = self._cut(resume=self._wanted())
        self._ended += 1
        ended.number, ended.accumulates, ended.scaled = self._ended, accumulates, scaled
        self._passes.append(ended)
        if found is None:
            ended.missed = wanted and not (self._blocked and len(self._passes) > 1)
            self._gave_way |= bool(_other_profilers)
            if self.active and self._wanted():
                self.start()
            return
        self._remember(found)
        ended.looked_at, ended.missed, ended.converted = True, False, found.converted
        self._resolve(ended, found.evaluated)
        for work, node, flops in found.backward:
            origin = self._origin(node)
            ended.trained[_placed(work, origin)] += flops
        for product, node in found.unaligned:
            origin = self._origin(node)
            module = product.module if product.module is not None or origin is None else origin.module
            self._unaligned.add(Unaligned(module, product.rows))
        for node in found.evaluated & self._opaque.keys():
            work, flops = self._opaque.pop(node)
            ended.trained[work] += 2 * flops

    def _remember(self, found: OperatorTrace) -> None:
        """Keep what later backward passes may need."""
        for work, nodes, flops in found.forward:
            if nodes:
                self._pending.append((work, nodes, flops))
            else:
                self._frozen[work] += flops
        del self._pending[:-REMEMBERED_NODES]
        self._opaque.update(found.opaque)
        self.overflows |= found.overflows
        self._origins.append(found.origins)
        while len(self._origins) > 1 and sum(map(len, self._origins)) > REMEMBERED_NODES:
            del self._origins[0]

    def _origin(self, node: GraphNode | None) -> Work | None:
        """Return where a node of autograd's graph was created."""
        return next((origins[node] for origins in reversed(self._origins) if node in origins), None) if node else None

    def _resolve(self, ended: _Pass, evaluated: set[GraphNode]) -> None:
        """Move work of forward passes to the backward pass that evaluated its nodes; what has no node is frozen."""
        ended.frozen, self._frozen = self._frozen, Counter()
        rest = []
        for work, nodes, flops in self._pending:
            if nodes & evaluated:
                ended.trained[work] += flops
            else:
                rest.append((work, nodes, flops))
        self._pending = rest

    def imply(self, inferred: Inferred) -> None:
        """Add a backward pass that was not recorded, of which the graph was read."""
        self._ended += 1
        self._passes.append(_Pass(inferred, number=self._ended))

    # -- the result --------------------------------------------------------------------------

    def begin_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that the step of an optimizer begins that is looked at: earlier passes do not count for it."""
        parameters = list(parameters)
        self.weights |= shapes_of(parameters)  # a group of parameters may have been added
        self._begun.update((id(parameter), self._ended) for parameter in parameters)

    def applied(self, parameters: set[int]) -> None:
        """Record that an optimizer has applied its gradients. parameters: ids."""
        self._applied |= parameters

    def products(self, parameters: set[int]) -> Products:
        """Return the products of the passes that reached some of the parameters.

        parameters: ids. If none was reached, all passes count: an engine may hold its own copies of parameters.
        """
        passes = self._reaching(parameters) or ([] if self._open is None else [self._open])
        whole = Products(passes=len(passes))
        for each in passes:
            whole.looked_at += each.looked_at
            whole.unscaled |= each.accumulates and not each.scaled
            whole.scaled |= each.scaled
            whole.inferred.add(each.inferred)
        if any(each.missed for each in passes):  # the products of a part of a step prove nothing
            whole.reason = self._prevented()
            return whole
        for each in passes:
            whole.trained += each.trained
            whole.frozen += each.frozen
            whole.converted += each.converted
        if self._open is None:  # else an optimizer is stepped by a hook of a parameter
            self._resume |= self.running
            self._remember(self._cut(resume=False) or OperatorTrace())
        whole.frozen += self._frozen
        for work, _, flops in self._pending:
            whole.frozen[work] += flops
        whole.called = None if self._ranges is None else dict(self._ranges.called)
        whole.overflows, whole.unaligned = set(self.overflows), set(self._unaligned)
        if not whole.trained and (whole.inferred.work or whole.inferred.compiled):
            whole.reason = "no operator of torch multiplied"
        return whole

    def _prevented(self) -> str:
        """Return why a step could not be recorded."""
        if self.reason:
            return self.reason
        if self._gave_way:
            return "another profiler runs"
        if self._open is not None or self._resume:
            return "a step and its backward pass are not separate"
        if self._blocked:
            return "a record_function range is open around the step"
        return "the step began before mpguard could record it"

    def _reaching(self, parameters: set[int]) -> list[_Pass]:
        begun = max((self._begun.get(parameter, 0) for parameter in parameters), default=0)
        passes = [each for each in self._passes if each.number > begun]
        return [each for each in passes if each.inferred.leaves & parameters] or passes


def _still_counts(earlier: _Pass, known: dict[int, bool]) -> bool:
    """True unless the gradients of a pass were thrown away. known: True for parameters that have a gradient."""
    if not earlier.accumulates or not known:
        return True
    leaves = earlier.inferred.leaves & known.keys() or known.keys()
    return any(known[leaf] for leaf in leaves)


def _placed(work: Work, origin: Work | None) -> Work:
    """Return work of a backward pass with the place of the forward pass that it belongs to."""
    if origin is None:
        return work
    module = work.module if work.module is not None else origin.module
    return dataclasses.replace(
        work, module=module, attention=work.attention or origin.attention, compiled=work.compiled or origin.compiled
    )


# -- the steps of optimizers -----------------------------------------------------------------


class _Steps:
    """The ranges that torch opens around the steps of optimizers. cut: True if one was open when a profiler stopped.

    Until it is closed, no profiler may start: it holds a pointer into the events of the one that was stopped.
    running: the optimizers whose steps run; one may call another's, which updates its parameters for it.
    """

    def __init__(self) -> None:
        self.running: list[_Step] = []
        self.cut = False


@dataclasses.dataclass(eq=False)
class _Step:
    """The step of an optimizer, while it runs. updated: ids of parameters for which it has called another's step."""

    optimizer: Any
    updated: set[int] = dataclasses.field(default_factory=set)


_steps = _Steps()


@contextlib.contextmanager
def step_of(optimizer: Any) -> Iterator[None]:
    """Record the step of an optimizer around its range; one may call another."""
    step = _Step(optimizer)
    _steps.running.append(step)
    try:
        yield
    finally:
        _steps.running.remove(step)
        _steps.cut = _steps.cut and bool(_steps.running)


def steps_around(optimizer: Any) -> list[Any]:
    """Return the optimizers whose steps run now and have called that of an optimizer; itself if it calls its base's."""
    running = [step.optimizer for step in _steps.running]
    last = max((index for index, each in enumerate(running) if each is optimizer), default=0)
    return running[:last]


def is_updated_by_others(optimizer: Any) -> bool:
    """True if the step of an optimizer has called steps of others for all its parameters.

    Else it is recorded for the steps around it that it has updated the parameters.
    """
    step = next((step for step in reversed(_steps.running) if step.optimizer is optimizer), None)
    others = [around for around in _steps.running if around.optimizer is not optimizer]
    if not others and (step is None or not step.updated):
        return False
    parameters = {id(own) for group in optimizer.param_groups for own in group["params"]}
    for around in others:
        around.updated |= parameters
    return step is not None and bool(parameters) and parameters <= step.updated


def updates_a_part(optimizer: Any) -> bool:
    """True if another optimizer with more parameters has called the step of this one: that one is proven as a whole.

    Its parts may be shards, which are others on each rank.
    """

    def parameters(of: Any) -> set[int]:
        return {id(own) for group in of.param_groups for own in group["params"]}

    return any(parameters(around) > parameters(optimizer) for around in steps_around(optimizer))


# -- torch's profiler ------------------------------------------------------------------------


def _gradients_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()


def _enable_profiler() -> bool:
    """Enable Kineto for the operators of this thread; False if a profiler is enabled already."""
    import torch
    from torch._C._autograd import _prepare_profiler, _profiler_enabled
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    if _profiler_enabled() or _other_profilers:
        return False
    _stop_in_forks()
    config = ProfilerConfig(ProfilerState.KINETO, True, False, False, False, False, _ExperimentalConfig(), "")
    with _quiet_kineto():
        _prepare_profiler(config, {ProfilerActivity.MTIA if _leaves_out_cuda() else ProfilerActivity.CPU})
        torch._C._autograd._enable_profiler(config, {ProfilerActivity.CPU})
    torch.autograd.profiler._run_on_profiler_start()  # type: ignore[no-untyped-call]  # compiled code names its regions
    return True


def _disable_profiler() -> tuple[list[Any], list[str], list[int]]:
    """Disable Kineto. Return its events, and the names and starts of those that are not finished."""
    import torch

    now = time.time_ns()
    torch.autograd.profiler._run_on_profiler_stop()  # type: ignore[no-untyped-call]
    with _quiet_torch() if _leaves_out_cuda() else contextlib.nullcontext():
        result = torch._C._autograd._disable_profiler()
    events = list(result.events())
    unfinished = [
        (event.name(), event.start_ns()) for event in events if event.end_ns() >= now and not event.is_async()
    ]
    unfinished += _without_end(result.experimental_event_tree())
    return events, [name for name, _ in unfinished], [start for _, start in unfinished]


def _without_end(level: list[Any]) -> list[tuple[str, int]]:
    """Return name and start of what was not finished: torch 2.11 leaves it out of the events, and in their tree."""
    found = []
    while level:
        opened = [node for node in level if node.end_time_ns < node.start_time_ns]
        found += [(node.name, node.start_time_ns) for node in opened]
        level = [child for node in opened for child in node.children]
    return found


def _leaves_out_cuda() -> bool:
    """True if Kineto is asked for the activities of MTIA, a device that is not there, in place of the CPU's.

    With the CPU's, it also traces the calls of the CUDA runtime, through CUPTI, which then stays attached: for the rest
    of the process each launch of a kernel takes longer (benchmarks/results/launches.json). The operators are recorded
    by torch itself in both cases. torch warns that Kineto has not seen them, so that this needs `_quiet_torch`.
    """
    import torch

    return torch.version.cuda is not None and _log_level() is not None


@functools.cache
def _log_level() -> Any:
    """Return the least level of the messages that torch's C++ code prints; None if it is not found."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so", mode=os.RTLD_NOLOAD), "FLAGS_caffe2_log_level")
    except (AttributeError, OSError, ValueError):
        return None


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Let torch's C++ code print errors, but no warnings."""
    level = _log_level()
    usual = level.value
    level.value = max(usual, ERROR)
    try:
        yield
    finally:
        level.value = usual


@contextlib.contextmanager
def _quiet_kineto() -> Any:
    """Set Kineto's log level for its start, unless the user has set it."""
    name, level = QUIET
    if name in os.environ:
        yield
        return
    os.environ[name] = level
    try:
        yield
    finally:
        os.environ.pop(name, None)


#: Threads in which a profiler runs that another thread wanted to stop. Only its own thread can, and the process crashes
#: at its end if it still runs then.
_left_running: set[int] = set()


def stop_left_profiler() -> None:
    """Stop the profiler of this thread, if the account could not, because the training runs in another thread."""
    if threading.get_ident() in _left_running:
        _left_running.discard(threading.get_ident())
        with contextlib.suppress(Exception):
            _disable_profiler()


#: Profilers of the program that are prepared or running.
_other_profilers: set[int] = set()


def other_profiler_starts(profiler: Any) -> None:
    """Record that a profiler of the program is prepared."""
    _other_profilers.add(id(profiler))


def other_profiler_ends(profiler: Any) -> None:
    """Record that a profiler of the program has ended."""
    _other_profilers.discard(id(profiler))


_forks_are_safe = False


def _stop_in_forks() -> None:
    """Let forked processes, such as those that load data, not record: nobody would collect their events."""
    global _forks_are_safe  # noqa: PLW0603  registered once per process
    if not _forks_are_safe:
        _forks_are_safe = True
        os.register_at_fork(after_in_child=_stop_recording)


def _stop_recording() -> None:
    import torch
    from torch._C._autograd import _profiler_enabled, _toggle_collection_dynamic
    from torch._C._profiler import ProfilerActivity

    with contextlib.suppress(Exception):
        if not _profiler_enabled():
            return
        if is_forked_after_cuda():
            torch._C._autograd._enable_record_function(False)
            return
        errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)  # Kineto warns about GPU activity, whether or not there is any
            _toggle_collection_dynamic(False, {ProfilerActivity.CPU})
        finally:
            os.dup2(errors, 2)
            os.close(errors)
            os.close(nowhere)


# -- modules ---------------------------------------------------------------------------------


class ModuleRanges:
    """Opens a range of the profiler around each call of a module, with global hooks.

    called: the classes of the modules that were called, by id. Not for compiled code: dynamo traces hooks of modules.
    """

    def __init__(self, on_call: Callable[..., None]) -> None:
        """Create ranges. on_call: is told each call, and by `outermost` if no other module calls it."""
        self.called: dict[int, str] = {}
        self._on_call = on_call
        self._handles: list[Any] = []
        self._open = threading.local()

    def install(self) -> None:
        """Register the hooks, once."""
        if self._handles:
            return
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._handles = [
            register_module_forward_pre_hook(contained_hook(self._enter, "the account of modules")),
            register_module_forward_hook(contained_hook(self._exit, "the account of modules"), always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks, and close the ranges that are open in this thread."""
        self.forget()
        self.close()

    def forget(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> list[int]:
        """Close the ranges that are open in this thread, and return their modules."""
        stack = self._stack()
        modules = [number for number, _ in stack]
        while stack:
            stack.pop()[1].__exit__(None, None, None)
        return modules

    def reopen(self, modules: list[int]) -> None:
        """Open the ranges again that `close` has closed."""
        for number in modules:
            self._push(number)

    def _push(self, number: int) -> None:
        from torch._C._profiler import _RecordFunctionFast

        opened = _RecordFunctionFast(f"{trace.MODULE}{number}")
        opened.__enter__()
        self._stack().append((number, opened))

    def _stack(self) -> list[tuple[int, Any]]:
        if not hasattr(self._open, "ranges"):
            self._open.ranges = []
        return self._open.ranges  # type: ignore[no-any-return]

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self.called[id(module)] = type(module).__name__
        self._on_call(outermost=not self._stack())
        self._push(id(module))

    def _exit(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        stack = self._stack()
        if not any(number == id(module) for number, _ in stack):
            return  # it was entered before the hooks were registered
        while stack:
            number, opened = stack.pop()
            opened.__exit__(None, None, None)
            if number == id(module):
                return


def shapes_of(parameters: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    """Return the shapes of the matrices among parameters; of those that ZeRO-3 has divided, the whole ones."""
    shapes = (tuple(getattr(own, "ds_shape", own.shape)) for own in parameters)
    return {shape for shape in shapes if len(shape) == 2}
