"""`StepAccount`: which matmuls ran between two applied steps of an optimizer, in which dtype, and for what.

torch's profiler records the operators with their operands' dtypes and shapes while a step is checked; nothing is put
between the program and its operators. The profiler is stopped and started again after each backward pass, so that
memory is bounded by one pass. A profiler of the program's own has precedence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof import profiler, program_threads, trace
from mpguard.runtime.proof.autocast_regions import Autocast
from mpguard.runtime.proof.compiled_graphs import NOT_RECORDED, CompiledGraphs
from mpguard.runtime.proof.inferred import Inferred
from mpguard.runtime.proof.products import Work
from mpguard.runtime.proof.ranges import Ranges
from mpguard.runtime.proof.trace import GraphNode, OperatorTrace, Overflow, Unaligned

if TYPE_CHECKING:
    import torch

#: Backward passes before an applied step of which each one is recorded; of later ones those with number 2**n.
EACH_PASS = 16

#: Calls of modules without a backward pass after which the events are read. Then calls without gradients are no longer
#: recorded, so that a long evaluation before the first step costs neither memory nor time.
LONG_CALLS = 5_000

#: Why operators could not be recorded where another thread trains, and where several do.
OTHER_THREAD = (
    "torch's profiler records the thread in which the optimizer was created, and another one trains: create the "
    "optimizer in the thread that trains"
)
SEVERAL_THREADS = "torch's profiler records one thread at a time, and several compute gradients"

#: Why a backward pass was not recorded that began while one of another thread ran.
AT_THE_SAME_TIME = "another thread computed gradients at the same time"

#: Nodes of autograd's graph whose modules are remembered for backward passes that come later.
REMEMBERED_NODES = 200_000


@dataclasses.dataclass
class Products:
    """The matmuls of a step. FLOPs by place.

    trained: their results reach a gradient. frozen: they do not. passes: backward passes, looked_at: of them. reason:
    why the operators could not be recorded (then `trained` and `frozen` are empty); empty if they were. inferred: what
    autograd's graph implies. called: the classes of the modules that were called, by id; None if calls were not
    observed. autocast: the autocast regions; None likewise. unscaled, scaled: True if a loss was not scaled by a
    GradScaler, and if one was. converted: elements that were copied to another dtype in backward, by the dtypes before
    and after. casts: elements that were rounded elsewhere. overflows, unaligned: what cannot be right in any policy,
    see `trace`.
    """

    trained: Counter[Work] = dataclasses.field(default_factory=Counter)
    frozen: Counter[Work] = dataclasses.field(default_factory=Counter)
    passes: int = 0
    looked_at: int = 0
    reason: str = ""
    inferred: Inferred = dataclasses.field(default_factory=Inferred)
    called: dict[int, str] | None = None
    autocast: Autocast | None = None
    unscaled: bool = False
    scaled: bool = False
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    casts: Counter[tuple[str, int | None]] = dataclasses.field(default_factory=Counter)
    overflows: set[Overflow] = dataclasses.field(default_factory=set)
    unaligned: set[Unaligned] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Pass:
    """A backward pass with the forward passes that belong to it.

    inferred: what its graph implies. number: it is the n-th that ended. missed: True if it should have been recorded.
    reason: why it was not recorded, where that is known. scaled: None if nothing was recorded. thread: the program's
    thread that computes it.
    """

    inferred: Inferred
    number: int = 0
    reason: str = ""
    accumulates: bool = True
    scaled: bool | None = None
    looked_at: bool = False
    missed: bool = True
    trained: Counter[Work] = dataclasses.field(default_factory=Counter)
    frozen: Counter[Work] = dataclasses.field(default_factory=Counter)
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    thread: int = dataclasses.field(default_factory=threading.get_ident)

    def marked(self, work: Work, nodes: Iterable[GraphNode]) -> Work:
        """Return work, marked if its nodes are those of a matmul in the loss."""
        if all(number not in self.inferred.in_the_loss for _, number in nodes):
            return work
        return dataclasses.replace(work, in_the_loss=True)


class _Forward:
    """What the forward passes have multiplied, until a backward pass reaches it or the step ends."""

    def __init__(self) -> None:
        self._pending: list[tuple[Work, frozenset[GraphNode], int]] = []
        self._frozen: Counter[Work] = Counter()
        self._origins: list[dict[GraphNode, Work]] = []
        self._opaque: dict[GraphNode, tuple[Work, int]] = {}
        self._likely: dict[GraphNode, tuple[Work, int]] = {}

    def remember(self, found: OperatorTrace) -> None:
        """Keep what later backward passes may need."""
        for work, nodes, flops in found.forward:
            if nodes:
                self._pending.append((work, nodes, flops))
            else:
                self._frozen[work] += flops
        del self._pending[:-REMEMBERED_NODES]
        self._opaque.update(found.opaque)
        self._likely.update(found.likely)
        self._origins.append(found.origins)
        for node, source in found.derived.items():
            found.origins[node] = _placed(found.origins[node], self._origin(source))
        while len(self._origins) > 1 and sum(map(len, self._origins)) > REMEMBERED_NODES:
            del self._origins[0]

    def reached_by(self, ended: _Pass, found: OperatorTrace) -> set[Unaligned]:
        """Move to a backward pass what it has reached, and add what it has multiplied itself.

        Return the FP8 matmuls in it that no kernel of a GPU takes.
        """
        self._resolve(ended, found.evaluated)
        for work, node, flops in found.backward:
            if node is None:  # a hook has multiplied, not a function of autograd: no gradient passes through it
                ended.frozen[work] += flops
                continue
            placed = _placed(work, self._origin(node))
            ended.trained[ended.marked(placed, {node})] += flops
        matrices = ended.inferred.matrix_functions
        for node in found.evaluated & self._likely.keys():
            work, flops = self._likely.pop(node)
            ended.trained[work] += 3 * flops if node[1] in matrices else 0
        for node in found.evaluated & self._opaque.keys():
            work, flops = self._opaque.pop(node)
            ended.trained[work] += 2 * flops
        unaligned = set()
        for product, behind in found.unaligned:
            origin = self._origin(behind)
            module = product.module if product.module is not None or origin is None else origin.module
            unaligned.add(Unaligned(module, product.rows))
        return unaligned

    def without_gradient(self, *, all_read: bool) -> Counter[Work]:
        """Return what no backward pass has reached. all_read: False if some were not recorded, which may have."""
        found = self._frozen.copy()
        for work, _, flops in self._pending if all_read else ():
            found[work] += flops
        return found

    def _origin(self, node: GraphNode | None) -> Work | None:
        """Return where a node of autograd's graph was created."""
        return next((origins[node] for origins in reversed(self._origins) if node in origins), None) if node else None

    def _resolve(self, ended: _Pass, evaluated: set[GraphNode]) -> None:
        """Move work of forward passes to the backward pass that evaluated its nodes; what has no node is frozen."""
        ended.frozen, self._frozen = self._frozen, Counter()
        rest = []
        for work, nodes, flops in self._pending:
            if nodes & evaluated:
                ended.trained[ended.marked(work, nodes)] += flops
            else:
                rest.append((work, nodes, flops))
        self._pending = rest


class StepAccount:
    """Records the matmuls of a process from `start` until `stop`.

    active: True between `start` and `stop`. reason: why it cannot record; empty if it can. overflows: numbers that did
    not fit the dtype of a tensor.
    """

    def __init__(self, previous: StepAccount | None = None) -> None:
        """Create an account. previous: the one before, whose limits hold on."""
        self.active = False
        self._recording: profiler.Recording | None = None
        self.reason: str = "" if previous is None else previous.reason
        self.weights: set[tuple[int, ...]] = set() if previous is None else previous.weights
        self.graphs: CompiledGraphs = CompiledGraphs() if previous is None else previous.graphs
        #: True if a recording without shapes is enough: all matmuls were those of compiled graphs with a hash.
        self._compiled_only: bool = previous is not None and previous.is_compiled_only
        self._shapes = True
        self.te_dtype: str | None = None
        self._ranges: Ranges = Ranges(self._called, named=previous is None or previous._ranges.named)
        #: The ranges of the program that were open when the profiler stopped, as far as their objects are known.
        self._open_ranges: list[weakref.ref[Any]] = [] if previous is None else previous._open_ranges
        #: True if there were such ranges: see `_cut`.
        self._blocked: bool = previous is not None and previous.has_open_ranges
        self._thread = 0
        self._open: _Pass | None = None if previous is None else previous._open  # the backward pass that runs
        self._threads: set[int] = set() if previous is None else previous._threads  # of backward passes
        self._seconds = 0.0
        self._resume = False  # after the optimizer's step
        self._calls = 0  # of modules, since the profiler started
        self._paused = False  # until a module is called with gradients
        self._forget()

    def _forget(self) -> None:
        """Forget what was recorded."""
        self._number = 0
        self._gave_way = False
        self._eager = False
        #: True if something was recorded without shapes that cannot be told without them.
        self.unknown = False
        self._passes: list[_Pass] = []
        self._forward = _Forward()
        self._applied: set[int] = set()
        self._casts: Counter[tuple[str, int | None]] = Counter()
        self.overflows: set[Overflow] = set()
        self._unaligned: set[Unaligned] = set()
        self._ended = 0
        self._begun: dict[int, int] = {}  # passes that had ended when the step began, by the id of a parameter

    # -- the profiler ------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while the profiler runs for this account; it stops at the end of the thread that has started it."""
        return self._recording is not None and self._recording.running

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
            self._recording, self._thread = profiler.start(shapes=self._shapes), threading.get_ident()
            if self.running:
                self._ranges.install()

    def stop(self) -> None:
        """Stop to record, and remove the hooks. What was recorded remains."""
        self.active = self._resume = self._paused = False
        self._ranges.remove()
        if self.running:
            self._cut(resume=False)

    def abandon(self) -> None:
        """Record nothing more in a fork, and leave the profiler alone: it is the parent's."""
        self.active = self._resume = self._paused = False
        self._recording = None
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
        self._paused = self._ranges.named
        if not self._paused:
            self.start()

    def enter_compiled_code(self) -> None:
        """Remove the hooks of modules before compiled code runs: dynamo would trace them, or compile again."""
        if self._ranges.named:
            self._ranges.leave_modules()
        self._called(outermost=True)

    def evaluation(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for the call of a compiled module, see `Ranges.evaluation`."""
        return self._ranges.evaluation(module)

    def known_graph(self, name: str) -> AbstractContextManager[None] | None:
        """Return a context manager for a call of compiled code whose matmuls are known; None if it is to be recorded.

        The matmuls of later checks are those of the first recording, which no check repeats. name: of the range, which
        has a hash of the code.
        """
        recording = self._recording
        if recording is None or not recording.running or not self.graphs.needs_no_operators(name, self.weights):
            return None
        return profiler.only_range(f"{name}{NOT_RECORDED}")

    def _called(self, *, outermost: bool) -> None:
        """Count the call of a module, and read the events after `LONG_CALLS`. outermost: no module calls it."""
        self._calls += 1
        profiler.record_on()
        if not outermost or self._open is not None or threading.get_ident() != self._thread:
            return
        if self._paused and _gradients_enabled():
            self.start()
        elif self.running and self._calls > LONG_CALLS:
            self._paused = not _gradients_enabled()
            self._calls = 0
            self._remember(self._cut(resume=not self._paused) or OperatorTrace())

    def enter_autocast(self, region: Any, *, inside: bool) -> None:
        """Record that an autocast region begins. inside: True if autocast was on."""
        if self.running:
            self._ranges.enter_autocast(region, inside=inside)

    def leave_autocast(self, region: Any) -> None:
        """Record that an autocast region ends."""
        self._ranges.leave_autocast(region)

    def range_without_data(self) -> contextlib.AbstractContextManager[Any]:
        """Return a range for operators on fake tensors, which are no part of the training."""
        return profiler.muted()

    @contextlib.contextmanager
    def _reporting_failures(self) -> Any:
        """Turn an error of the profiler into the reason why nothing is observed: it must not end the training."""
        try:
            yield
        except Exception as error:
            self._recording = None
            self.reason = f"torch's profiler failed: {type(error).__name__}: {error}"

    def _cut(self, *, resume: bool) -> OperatorTrace | None:
        """Return what ran since the last cut; None if the profiler does not run. resume: True to record on.

        A range that is open when the profiler stops must be closed before the profiler starts again: it holds a pointer
        into the events of the first. Ranges of modules are closed here; the program's own prevent another start.
        """
        recording, self._recording = self._recording, None
        if recording is None or not recording.running:
            return None
        began = time.monotonic()
        with self._reporting_failures():
            if not recording.is_of_this_thread:
                self.reason = SEVERAL_THREADS if len(self._threads) > 1 else OTHER_THREAD
                return None
            opened = self._ranges.close()
            events, unfinished, begun = recording.stop(opened)
            of_program = [name for name in unfinished if not name.startswith(trace.IGNORED)]
            self._blocked, self._open_ranges = bool(of_program), profiler.ranges_named(of_program)
            _steps.cut = bool(unfinished)
            closures = frozenset(begun if resume else ())
            found = trace.read(events, self.weights, self.te_dtype, closures, self.graphs, shapes=recording.shapes)
            self._eager |= found.eager
            self.unknown |= found.unknown
            if resume and not unfinished:
                self._recording = profiler.start(shapes=self._shapes)
                self._ranges.reopen(opened)
            self._resume |= resume and _steps.cut and not self._blocked
            self._seconds += time.monotonic() - began
            return found
        return None

    @property
    def has_open_ranges(self) -> bool:
        """True unless all ranges of the program are closed, so that the next step may be recorded.

        Each microbatch of a pipeline has its ranges: one is open whenever a backward pass ends.
        """
        return self._blocked and not (self._open_ranges and all(each() is None for each in self._open_ranges))

    @property
    def is_compiled_only(self) -> bool:
        """True if the matmuls of the last step were those of compiled graphs with a hash, all of which are known."""
        return any(each.trained for each in self._passes) and not self._eager and not self.unknown

    def trusts_graphs(self, trusts: bool) -> None:
        """Record without shapes from now on, where the last step shows that this is enough; else with shapes."""
        self._shapes = not (trusts and self._compiled_only)

    def take_seconds(self) -> float:
        """Return for how long events were read since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _wanted(self) -> bool:
        """True if the next backward pass is to be recorded."""
        following = self._number + 1
        return following <= EACH_PASS or following & (following - 1) == 0

    # -- passes ------------------------------------------------------------------------------

    def begin_pass(self, inferred: Inferred, optimizers: Iterable[Any]) -> None:
        """Record that a backward pass begins: earlier ones whose gradients were thrown away do not count.

        inferred: what its graph implies.
        """
        profiler.record_on()
        self._open = _Pass(inferred)
        self._threads.add(self._open.thread)
        known: dict[int, bool] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                known.update((id(own), own.grad is not None or id(own) in self._applied) for own in group["params"])
        self._passes = [
            each for each in self._passes if program_threads.is_another(each.thread) or _still_counts(each, known)
        ]

    def end_pass(self, accumulates: bool, *, scaled: bool = False) -> None:
        """Record that the backward pass has ended.

        accumulates: True if it has added to `.grad` of leaves. scaled: True if a GradScaler has scaled its loss.
        """
        assert self._open is not None
        ended, self._open, wanted = self._open, None, self._wanted()
        self._calls = 0
        self._ranges.pass_ended()
        self._number += accumulates
        found = self._cut(resume=self._wanted())
        self._ended += 1
        ended.number, ended.accumulates, ended.scaled = self._ended, accumulates, scaled
        self._passes.append(ended)
        if found is None:
            ended.missed = wanted and not (self._blocked and len(self._passes) > 1)
            self._gave_way |= profiler.is_prepared_by_program()
            if self.active and self._wanted():
                self.start()
            return
        self._remember(found)
        ended.looked_at, ended.missed, ended.converted = True, False, found.converted
        self._unaligned |= self._forward.reached_by(ended, found)

    def _remember(self, found: OperatorTrace, *, before_step: bool = True) -> None:
        """Keep what later backward passes may need. before_step: False for what follows the last one of a step."""
        self._forward.remember(found)
        for (to, module, shape), elements in found.casts.items():
            # Between steps a script may keep an average of the weights in any dtype, which trains nothing.
            if module is not None or not before_step or (len(shape) > 1 and shape not in self.weights):
                self._casts[to, module] += elements
        self.overflows |= found.overflows

    def imply(self, inferred: Inferred, reason: str = "") -> None:
        """Add a backward pass that was not recorded, of which the graph was read. reason: why it was not recorded."""
        self._ended += 1
        self._passes.append(_Pass(inferred, number=self._ended, reason=reason))
        self._threads.add(threading.get_ident())

    # -- the result --------------------------------------------------------------------------

    def begin_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that the step of an optimizer begins that is checked: earlier passes do not count for it."""
        parameters = list(parameters)
        if self._blocked and not self.has_open_ranges:
            self._blocked, self._resume = False, True
        self.weights |= shapes_of(parameters)  # a group of parameters may have been added
        self._begun.update((id(parameter), self._ended) for parameter in parameters)

    def applied(self, parameters: set[int]) -> None:
        """Record that an optimizer has applied its gradients. parameters: ids."""
        self._applied |= parameters

    def leaves(self) -> set[int]:
        """Return the ids of the leaves that the recorded backward passes have reached."""
        return {leaf for each in self._passes for leaf in each.inferred.leaves}

    def products(self, parameters: set[int]) -> Products:
        """Return the matmuls of the passes that reached some of the parameters.

        parameters: ids. If none was reached, all passes count: an engine may hold its own copies of parameters.
        """
        passes = self._reaching(parameters) or ([] if self._open is None else [self._open])
        whole = Products(passes=len(passes))
        for each in passes:
            whole.looked_at += each.looked_at
            whole.unscaled |= each.accumulates and each.scaled is False
            whole.scaled |= bool(each.scaled)
            whole.inferred.add(each.inferred)
        if self.unknown or any(each.missed for each in passes):  # the matmuls of a part of a step prove nothing
            whole.reason = next((each.reason for each in passes if each.reason), "") or self._prevented()
            return whole
        for each in passes:
            whole.trained += each.trained
            whole.frozen += each.frozen
            whole.converted += each.converted
        if self._open is None:  # else an optimizer is stepped by a hook of a parameter
            self._resume |= self.running
            self._remember(self._cut(resume=False) or OperatorTrace(), before_step=False)
        whole.frozen += self._forward.without_gradient(all_read=not self._blocked)
        whole.called = dict(self._ranges.called) if self._ranges.named else None
        whole.autocast = self._ranges.autocast() if self._ranges.named else None
        whole.casts, whole.overflows, whole.unaligned = self._casts.copy(), set(self.overflows), set(self._unaligned)
        if not whole.trained and (whole.inferred.work or whole.inferred.compiled):
            whole.reason = "no operator of torch multiplied"
        return whole

    def _prevented(self) -> str:
        """Return why a step could not be recorded."""
        if self.reason:
            return self.reason
        if self.unknown:
            return "other code was compiled since it was recorded; the next step is recorded again"
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
        own = [each for each in passes if not program_threads.is_another(each.thread)]
        several = len({each.thread for each in passes}) > 1
        return [each for each in passes if each.inferred.leaves & parameters] or (own if several else passes)


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
        work,
        module=module,
        attention=work.attention or origin.attention,
        compiled=work.compiled or origin.compiled,
        by_script=work.by_script or origin.by_script,
        wide_only=work.wide_only or origin.wide_only,
    )


# -- the steps of optimizers -----------------------------------------------------------------


class _Steps(threading.local):
    """The ranges that torch opens around the steps of optimizers. cut: True if one was open when a profiler stopped.

    Until it is closed, no profiler may start: it holds a pointer into the events of the one that was stopped.
    running: the optimizers whose steps run; one may call another's, which updates its parameters for it. Each thread
    has its own.
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
def step_of(optimizer: Any, *, trains: bool) -> Iterator[None]:
    """Record the step of an optimizer around its range; one may call another.

    trains: False if it has no closure: then its operators, which may be more than those of the model, are recorded from
    the first call of a module on only.
    """
    step = _Step(optimizer)
    _steps.running.append(step)
    try:
        with contextlib.nullcontext() if trains else profiler.muted():
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


def _gradients_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()


def shapes_of(parameters: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    """Return the shapes of the matrices among parameters; of those that ZeRO-3 has divided, the whole ones."""
    shapes = (tuple(getattr(own, "ds_shape", own.shape)) for own in parameters)
    return {shape for shape in shapes if len(shape) == 2}
