"""`HandOffs`: values of gradients between hand-offs: what one leaves, and what the next one finds.

A backward pass leaves gradients; the next pass, clipping, unscaling, the reduction and the optimizer's step find them.
Between two of them only the script changes values: what it does is compared, what torch computes is not. The gradients
that were left by passes that each began without one, or that `torch.autograd.grad` returned, are what a script may add
up itself: their sum is computed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof import program_threads, samples, witness
from mpguard.runtime.proof.samples import LEAVES, is_capturing, sample

if TYPE_CHECKING:
    import torch

#: Gradients that are kept of each tensor for the sum of a script; and tensors whose sums are computed, if none fits.
TERMS, SUMS = 64, 8

#: Of how many models leaves are sampled that no optimizer has.
MODELS = 4


@dataclasses.dataclass(frozen=True)
class Witness:
    """Rounding that was witnessed in one tensor.

    row: `accumulation`, `gradients`, `weights` or `states`. when: between which hand-offs. parameter: the id of the
    parameter. place: the position of one element.
    """

    row: str
    when: str
    parameter: int
    match: witness.Match
    place: tuple[int, ...] = ()

    def describe(self, name: str) -> str:
        """Return the tensor, one element before and after, and how many were changed."""
        match, place = self.match, f"[{', '.join(map(str, self.place))}]" if self.place else ""
        times = f", times {match.factor:.4g}" if match.factor != 1 and not match.to.startswith("1/") else ""
        return (
            f"{name}{place} was {match.before:.9g} and became {match.after:.9g}{times}; "
            f"{match.changed} of {match.sampled} sampled elements are changed so"
        )


class HandOffs:
    """Samples of gradients in this process. Holds weak references and small samples.

    optimizers: those of the process. found: what was witnessed, once for each tensor.
    """

    def __init__(self, optimizers: Collection[Any] = ()) -> None:
        self.optimizers = optimizers
        self.found: list[Witness] = []
        self._chosen: weakref.WeakKeyDictionary[Any, tuple[int, list[tuple[int, int]]]] = weakref.WeakKeyDictionary()
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}  # of no optimizer
        self._left: dict[int, torch.Tensor] = {}
        self._terms: dict[int, list[torch.Tensor]] = {}
        #: Factors by which the script has multiplied gradients since the last backward pass began.
        self._factors: dict[int, set[float]] = {}
        #: The scale by which the gradients of an optimizer were divided, by its id.
        self._scales: dict[int, float] = {}
        self._hooked: dict[int, torch.Tensor] = {}
        self._got: dict[int, torch.Tensor] = {}  # what hooks before a step get
        #: The thread of the last backward pass that has reached a leaf: only it reads the gradient around a pass.
        self._threads: dict[int, int] = {}

    def release(self) -> None:
        """Release the samples; what was found remains."""
        self._leaves, self._left, self._terms, self._factors, self._hooked = {}, {}, {}, {}, {}
        self.optimizers, self._threads, self._got = (), {}, {}

    def forget_leaf(self, number: int) -> None:
        """Release the weak reference to a tensor, and its samples. number: its id."""
        for known in (self._leaves, self._left, self._terms, self._factors, self._hooked, self._threads):
            known.pop(number, None)

    # -- which tensors are sampled -----------------------------------------------------------

    def track(self, leaves: Iterable[torch.Tensor]) -> None:
        """Choose leaves of which samples are taken, among those that no optimizer has."""
        if len(self._leaves) >= MODELS * LEAVES:
            return
        new = [each for each in leaves if id(each) not in self._leaves]
        if new:
            own = {id(each) for optimizer in self.optimizers for each in _parameters(optimizer)}
            new = [each for each in new if id(each) not in own]
            self._leaves |= {id(new[number]): weakref.ref(new[number]) for number in samples.choose(new)}

    def _tracked(self) -> dict[int, torch.Tensor]:
        found = {key: leaf for key, reference in self._leaves.items() if (leaf := reference()) is not None}
        for optimizer in list(self.optimizers):
            found |= self._tracked_of(optimizer)
        return found

    def _tracked_here(self) -> dict[int, torch.Tensor]:
        """Return those that no backward pass of another thread reaches: it may change their gradients at any time."""
        own, elsewhere = threading.get_ident(), set[int]()
        for optimizer in list(self.optimizers):
            if self._is_elsewhere(optimizer):
                elsewhere |= self._tracked_of(optimizer).keys()
        return {
            key: leaf
            for key, leaf in self._tracked().items()
            if key not in elsewhere and self._threads.get(key, own) == own
        }

    def _tracked_of(self, optimizer: Any) -> dict[int, torch.Tensor]:
        """Return the sampled parameters of an optimizer, by id. It keeps their positions: no weak reference."""
        places = [(a, b) for a, group in enumerate(optimizer.param_groups) for b in range(len(group["params"]))]
        count, chosen = self._chosen.get(optimizer, (0, []))
        if count != len(places):
            numbers = samples.choose([optimizer.param_groups[a]["params"][b] for a, b in places])
            chosen = [places[number] for number in numbers]
            with contextlib.suppress(TypeError):  # the update of a script is no optimizer
                self._chosen[optimizer] = len(places), chosen
        own = (optimizer.param_groups[a]["params"][b] for a, b in chosen)
        return {id(each): each for each in own}

    @contextlib.contextmanager
    def optimizers_here(self, optimizers: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield the optimizers whose gradients can be read: no pass of another thread reaches their parameters."""
        with program_threads.reading:
            yield [each for each in optimizers if not self._is_elsewhere(each)]

    def _is_elsewhere(self, optimizer: Any) -> bool:
        own, threads = threading.get_ident(), {self._threads.get(id(each)) for each in _parameters(optimizer)} - {None}
        return bool(threads - {own}) or (not threads and program_threads.is_used_elsewhere(optimizer))

    # -- backward passes ---------------------------------------------------------------------

    def pass_begins(self, leaves: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compare what a backward pass finds with what the last one left, and return samples of it."""
        leaves, own = list(leaves), threading.get_ident()
        with program_threads.reading:
            self._threads.update((id(leaf), own) for leaf in leaves)
            self.track(leaves)
            found = self._hand_off("accumulation", "between two backward passes", self._tracked_here())
        for leaf in leaves:
            self._factors.pop(id(leaf), None)
        return found

    def pass_not_sampled(self, leaves: Iterable[torch.Tensor]) -> None:
        """Forget what was left in leaves that a thread's pass reaches while the pass of another thread is sampled."""
        with program_threads.reading:
            for leaf in leaves:
                if program_threads.is_another(self._threads.get(id(leaf), 0)):
                    self._threads[id(leaf)] = threading.get_ident()
                    self._left.pop(id(leaf), None)
                    self._terms.pop(id(leaf), None)

    def pass_ended(self, leaves: Iterable[torch.Tensor], before: Mapping[int, torch.Tensor]) -> None:
        """Record what a backward pass has left. before: what it found."""
        with program_threads.reading:
            everyones, tracked = self._tracked(), self._tracked_here()
            now = _gradients(tracked)
        earlier = [key for key, flag in zip(before, samples.are_set(list(before.values())), strict=True) if flag]
        made = {id(leaf) for leaf in leaves}
        for key, values in now.items():
            if key in earlier:
                self._terms.pop(key, None)
            elif key in made or key not in before:
                self._add_term(key, values)
        self._left = {key: each for key, each in self._left.items() if key in everyones and key not in tracked} | now
        for key in tracked:
            hooked = self._hooked.pop(key, None)
            if hooked is not None and key not in now:  # a hook has taken it away
                self._add_term(key, hooked)
            elif hooked is not None:
                seen = _Seen.of(tracked[key], hooked, now[key])
                self._judge("accumulation", "in a hook of the backward pass", seen)

    @contextlib.contextmanager
    def before_hooks(self, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
        """Sample gradients before the script's hooks on tensors have them, during a backward pass."""
        hooked = [leaf for leaf in leaves if getattr(leaf, "_post_accumulate_grad_hooks", None) or leaf._backward_hooks]
        handles = (samples.safely(self._hook, hooked) or []) if hooked else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, leaves: list[Any]) -> list[Any]:
        """Register a hook before the others of each sampled leaf."""
        tracked, handles = self._tracked(), list[Any]()
        for leaf in leaves:
            if id(leaf) in tracked and getattr(leaf, "_post_accumulate_grad_hooks", None):
                handles.append(leaf.register_post_accumulate_grad_hook(self._sample_in_hook))
                _reorder(leaf._post_accumulate_grad_hooks, [handles[-1].id])
            if id(leaf) in tracked and leaf._backward_hooks:
                handles += self._between_hooks(leaf)
        return handles

    def _between_hooks(self, leaf: Any) -> list[Any]:
        """Register hooks before, between and after those that may replace a gradient on its way to `.grad`."""
        left: list[torch.Tensor] = []

        def compare(gradient: torch.Tensor) -> None:
            samples.safely(self._judge_in_hook, leaf, left, gradient)

        hooks = list(leaf._backward_hooks)
        handles = [leaf.register_hook(compare) for _ in range(len(hooks) + 1)]
        own = (each.id for each in handles)
        _reorder(leaf._backward_hooks, [next(own), *(each for hook in hooks for each in (hook, next(own)))])
        return handles

    def _judge_in_hook(self, leaf: torch.Tensor, left: list[torch.Tensor], gradient: torch.Tensor) -> None:
        """Compare a gradient with the one that the hook before it got, and keep it for the next one."""
        found = [sample(gradient)] if not is_capturing() and _is_readable(gradient) else []
        if left and found:
            self._judge("accumulation", "in a hook of the backward pass", _Seen.of(leaf, left[0], found[0]))
        left[:] = found

    def _sample_in_hook(self, leaf: torch.Tensor) -> None:
        found = samples.safely(_gradients, {id(leaf): leaf}) or {}
        self._hooked |= found
        self._left |= found  # a hook may clip, reduce or step before the pass ends

    def returned(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record gradients that `torch.autograd.grad` has returned."""
        pairs = list(pairs)
        self.track(leaf for leaf, _ in pairs)
        tracked = self._tracked()
        for leaf, made in pairs:
            if id(leaf) in tracked and _is_readable(made):
                self._add_term(id(leaf), sample(made))

    def _add_term(self, key: int, values: torch.Tensor) -> None:
        terms = self._terms.setdefault(key, [])
        if len(terms) < TERMS and _is_fp32(values):
            terms.append(values)

    # -- what follows a pass -----------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, when: str, parameters: Iterable[Any]) -> Iterator[None]:
        """Compare what an operation of torch on gradients finds, and record what it leaves. when: before which one."""
        own = {id(each) for each in parameters}
        samples.safely(self._find, when, own)
        yield
        samples.safely(self._leave, own)

    @contextlib.contextmanager
    def unscaling(self, optimizer: Any, scale: float) -> Iterator[None]:
        """Do the same around the division by a loss scale, before which the script must not have divided by it."""
        own = {id(each) for each in _parameters(optimizer)}
        samples.safely(self._find, "before `unscale_`", own, scale)
        yield
        samples.safely(self._leave, own)
        self._scales[id(optimizer)] = scale

    def _find(self, when: str, keys: Collection[int], scale: float = 0.0) -> None:
        tracked = {key: each for key, each in self._tracked().items() if key in keys}
        self._hand_off("gradients", when, tracked, scale)

    def _leave(self, keys: Collection[int]) -> None:
        if not is_capturing():
            self._left |= _gradients({key: each for key, each in self._tracked().items() if key in keys})

    def reduction_finds(self, parameters: Iterable[torch.Tensor], flat: torch.Tensor | None) -> None:
        """Compare what a collective of the script sends with what was left, and forget that: others are added to it.

        flat: a copy of the gradients of the parameters in a row; None if the gradients themselves are sent.
        """
        tracked, offset = self._tracked(), 0
        for own in parameters:
            size = samples.local(own).numel()
            known = id(own) in self._left or id(own) in self._terms
            if id(own) in tracked and known and not is_capturing():
                sent = own.grad if flat is None else flat[offset : offset + size].view(samples.local(own).shape)
                terms = self._terms.get(id(own), ())
                seen = _Seen.of(own, self._left.get(id(own)), sample(sent), terms)
                self._judge("gradients", "before the reduction", seen)
            self._left.pop(id(own), None)
            self._terms.pop(id(own), None)
            offset += size

    def sum_of_passes(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return samples of the sum of the gradients that passes have left in a tensor, as far as it is sampled."""
        terms = self._terms.get(id(own), [])
        return functools.reduce(operator.add, terms) if terms else None

    def step_begins(self, optimizer: Any) -> None:
        """Compare what a step finds; what follows it has nothing to do with what was left before."""
        tracked = self._tracked_of(optimizer)
        scale, inside = self._scales.pop(id(optimizer), 0.0), getattr(optimizer, "grad_scale", None)
        if inside is not None and not is_capturing():  # a fused optimizer divides by it
            scale = float(inside)
        self._got = self._hand_off("gradients", "before the step", tracked, scale)
        for key in tracked:
            for known in (self._left, self._terms, self._factors, self._hooked):
                known.pop(key, None)

    def pre_hooks_ended(self, optimizer: Any) -> None:
        """Compare what the hooks before a step got with what they leave to the step."""
        got, self._got = self._got, {}
        if getattr(optimizer, "_optimizer_step_pre_hooks", None) and got and not is_capturing():
            tracked = {key: own for key, own in self._tracked_of(optimizer).items() if key in got}
            for key, values in _gradients(tracked).items():
                self._judge("gradients", "in a hook before the step", _Seen.of(tracked[key], got[key], values))

    def _hand_off(
        self, row: str, when: str, tracked: Mapping[int, torch.Tensor], scale: float = 0.0
    ) -> dict[int, torch.Tensor]:
        """Compare gradients with what was left, and return samples of them."""
        if is_capturing():
            return {}
        now = _gradients(tracked)
        compared = [key for key in now if key in self._left or key in self._terms]
        left = [self._left.get(key, now[key]) for key in compared]
        differ = [key for key in compared if key not in self._left]  # they were only returned
        if not samples.are_equal(left, [now[key] for key in compared]):
            differ = compared
        seen, sums, known = [], 0, len(self.found)
        for key in differ or (compared if scale else ()):
            terms = self._terms.get(key, [])
            sums += key not in self._left or len(terms) > 1
            seen.append(_Seen.of(tracked[key], self._left.get(key), now[key], terms if sums <= SUMS else ()))
            self._judge(row, when, seen[-1], scale)
        if len(self.found) == known:
            self._judge_together(row, when, [each for each in seen if each.is_changed])
        return now

    def _judge(self, row: str, when: str, seen: _Seen, scale: float = 0.0) -> None:
        """Record a witness if a gradient was rounded since it was left, or is the sum of others in 16 bits."""
        key, left, found = id(seen.own), seen.left, seen.found
        if (
            not seen.is_fp32
            or not bool(found.any())
            or any(key == each.parameter and row == each.row for each in self.found)
        ):
            return  # it was set to zero
        match = None
        if left is not None and scale and 1 / scale in self._factors.get(key, ()):
            match, when = witness.divided(left * scale, left, scale), "by the script, and by `unscale_` or the step"
        elif left is not None and seen.is_changed:
            match = witness.rounded(left, found)
            self._factors.setdefault(key, set()).update(witness.factors(left, found))
            if match is None and scale and (match := witness.divided(left, found, scale)) is not None:
                when = "by the script, and by `unscale_` or the step"
            if match is None:
                match = witness.on_grid(left, found, samples.row_of(seen.own))
        if match is None and seen.may_be_sum and (match := witness.summed(seen.terms, found)) is not None:
            row, when = "accumulation", "in the sum of the script"
        if match is not None:
            self._add(row, when, seen.own, match)

    def _judge_together(self, row: str, when: str, seen: list[_Seen]) -> None:
        """Do the same for all gradients that were changed: rounding may change few elements of each."""
        import torch

        known = [each for each in seen if each.is_fp32 and each.left is not None]
        if len(known) < 2:
            return
        sizes = [each.found.numel() for each in known]
        match = witness.rounded(
            torch.cat([each.left for each in known if each.left is not None]),
            torch.cat([each.found for each in known]),
        )
        if match is not None:
            number = match.number
            for each, size in zip(known, sizes, strict=True):
                if number < size:
                    self._add(row, when, each.own, dataclasses.replace(match, number=number))
                    return
                number -= size

    def _add(self, row: str, when: str, own: torch.Tensor, match: witness.Match) -> None:
        self.found.append(Witness(row, when, id(own), match, tuple(samples.place(own, match.number))))


@dataclasses.dataclass
class _Seen:
    """Samples of a gradient at a hand-off, on the CPU: what was left, what is found, and what a script may add up."""

    own: torch.Tensor
    left: torch.Tensor | None
    found: torch.Tensor
    terms: list[torch.Tensor]

    @classmethod
    def of(
        cls, own: torch.Tensor, left: torch.Tensor | None, found: torch.Tensor, terms: Iterable[torch.Tensor] = ()
    ) -> _Seen:
        """Return samples; without those of another shape."""
        left = left.cpu() if left is not None and left.shape == found.shape else None
        return cls(own, left, found.cpu(), [each.cpu() for each in terms if each.shape == found.shape])

    @property
    def is_fp32(self) -> bool:
        return _is_fp32(self.found) and (self.left is None or _is_fp32(self.left))

    @property
    def is_changed(self) -> bool:
        """True if another value was left than is found."""
        return self.left is not None and not witness.same(self.left, self.found)

    @property
    def may_be_sum(self) -> bool:
        """True if the script may have added up gradients: it has changed the last one, or one was only returned."""
        return bool(self.terms) and (self.left is None or (len(self.terms) > 1 and self.is_changed))


def _parameters(optimizer: Any) -> list[Any]:
    return [own for group in optimizer.param_groups for own in group["params"]]


def _reorder(hooks: dict[int, Any], order: Iterable[int]) -> None:
    """Put the hooks of a tensor into another order; those that are not named follow. order: their ids."""
    found = {number: hooks[number] for number in order} | hooks
    hooks.clear()
    hooks.update(found)


def _gradients(tracked: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return samples of the gradients of tensors, by their ids."""
    return {key: sample(own.grad) for key, own in tracked.items() if own.grad is not None and _is_readable(own.grad)}


def _is_readable(gradient: Any) -> bool:
    own = samples.local(gradient)
    return not own.is_sparse and own.is_floating_point() and samples.is_allocated(own)


def _is_fp32(values: torch.Tensor) -> bool:
    import torch

    return values.dtype is torch.float32
