"""Values of gradients between hand-offs, and of weights between steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

from mpguard.runtime.proof import gradients, handoffs, master_values, recomputed, remarks, samples


def backward(watch: gradients.Gradients, loss: torch.Tensor) -> None:
    with watch.during_backward([loss], True):
        loss.backward()


def layers(*widths: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(width, 3)) for width in widths]


def observed_step(values: master_values.MasterValues, optimizer: torch.optim.Optimizer, own: list[Any]) -> None:
    """Step an optimizer with random gradients, observed as in a run."""
    for each in own:
        each.grad = torch.randn_like(each)
    values.begin_step(optimizer)
    optimizer.step()
    values.end_step(optimizer)


def pass_of(watch: gradients.Gradients, own: list[nn.Parameter]) -> None:
    backward(watch, torch.stack([(each * torch.randn_like(each)).sum() for each in own]).sum())


def test_the_first_hook_of_a_tensor_is_the_one_that_samples() -> None:
    (own,) = layers(40)
    calls: list[str] = []

    def rounds(each: Any) -> None:
        calls.append("script")
        each.grad.copy_(each.grad.bfloat16())

    own.register_post_accumulate_grad_hook(rounds)
    watch = gradients.Gradients()
    pass_of(watch, [own])
    (found,) = watch.handoffs.found
    assert (found.row, found.when, found.match.to) == ("accumulation", "in a hook of the backward pass", "bf16")
    assert calls == ["script"] and len(own._post_accumulate_grad_hooks) == 1, "the own hook is removed"
    assert found.describe("`w`").startswith(f"`w`[{found.place[0]}, {found.place[1]}] was ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hook_that_steps_during_the_pass_hands_off_its_gradient(dtype: torch.dtype) -> None:
    """The optimizer is stepped within the backward pass, after two passes: what it finds is what they have left."""
    (own,) = layers(40)
    optimizer = torch.optim.SGD([own])
    watch = gradients.Gradients([optimizer])

    def steps(each: Any) -> None:
        each.grad.copy_(each.grad.to(dtype))
        watch.handoffs.step_begins(optimizer)
        each.grad = None

    pass_of(watch, [own])
    own.register_post_accumulate_grad_hook(steps)
    pass_of(watch, [own])
    pass_of(watch, [own])
    found = [(each.row, each.when, each.match.to) for each in watch.handoffs.found]
    assert found == ([("gradients", "before the step", "bf16")] if dtype is torch.bfloat16 else [])


@pytest.mark.parametrize(
    ("hook", "to"),
    [
        (lambda gradient: gradient.bfloat16().float(), "bf16"),
        (lambda gradient: gradient.copy_(gradient.half()), "fp16"),
        (lambda gradient: (gradient * 4).bfloat16().float(), "bf16"),
        (lambda gradient: gradient * 0.5, None),
        (lambda gradient: gradient.clamp(-0.5, 0.5), None),
        (lambda gradient: None, None),
    ],
    ids=["replaced", "in place", "times a factor", "scaled", "clamped", "read"],
)
def test_what_hooks_of_tensors_change_is_compared(hook: Any, to: str | None) -> None:
    (own,) = layers(40)
    own.register_hook(lambda gradient: gradient + 0.25)
    own.register_hook(hook)
    own.register_hook(lambda gradient: gradient * 3)
    hooks, watch = list(own._backward_hooks.items()), gradients.Gradients()
    for _ in range(2):
        pass_of(watch, [own])
    found = [(each.row, each.when, each.match.to.partition(" ")[0]) for each in watch.handoffs.found]
    assert found == ([("accumulation", "in a hook of the backward pass", to)] if to else [])
    assert list(own._backward_hooks.items()) == hooks, "the own hooks are removed"


def test_few_changed_values_of_many_tensors_are_judged_together() -> None:
    own = layers(*[2] * 12)
    optimizer = torch.optim.SGD(own, 0.1)
    watch = gradients.Gradients([optimizer])
    pass_of(watch, own)
    for each in own:
        each.grad = each.grad.half().float()  # type: ignore[union-attr]
    watch.handoffs.step_begins(optimizer)
    (found,) = watch.handoffs.found
    assert (found.row, found.when, found.match.to) == ("gradients", "before the step", "fp16")
    assert found.match.changed > 8 and found.parameter in set(map(id, own)) and len(found.place) == 2


def test_what_a_step_has_applied_is_not_compared_with_the_next_gradients() -> None:
    own = layers(64)
    optimizer = torch.optim.SGD(own, 0.1)
    watch = gradients.Gradients([optimizer])
    pass_of(watch, own)
    watch.handoffs.step_begins(optimizer)
    own[0].grad = own[0].grad.bfloat16().float()  # type: ignore[union-attr]  # after the step: nothing applies it
    watch.handoffs.step_begins(optimizer)
    assert not watch.handoffs.found


def test_nothing_is_read_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    own = layers(64)
    optimizer = torch.optim.SGD(own, 0.1)
    watch = gradients.Gradients([optimizer])
    pass_of(watch, own)
    for module in (samples, handoffs, gradients):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    monkeypatch.setattr(samples, "index_of", None)
    own[0].grad = own[0].grad.bfloat16().float()  # type: ignore[union-attr]
    pass_of(watch, own)
    with watch.handoffs.around("before clipping", own):
        pass
    watch.handoffs.step_begins(optimizer)
    assert not watch.handoffs.found


def test_tensors_are_chosen_by_a_fixed_draw() -> None:
    large, small = [torch.zeros(64)] * 100, [torch.zeros(2)] * 100
    chosen = samples.choose([*large, *small])
    assert (
        len(chosen) == samples.LEAVES == len(set(chosen))
        and max(chosen) < 100
        and chosen == samples.choose([*large, *small])
    )
    assert len({b - a for a, b in itertools.pairwise(chosen)}) > 2, "no stride"
    assert samples.choose(small[:5]) == [0, 1, 2, 3, 4]


# -- weights ---------------------------------------------------------------------------------------


def subclass(kind: Any, dtype: torch.dtype | None) -> Any:
    """Return a class whose step calls torch's and rounds the weights then, or not."""

    class Own(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            with torch.no_grad():
                for own in self.param_groups[0]["params"]:
                    own.copy_(own if dtype is None else own.to(dtype))

    return Own


@pytest.mark.parametrize("name", sorted(recomputed.ELEMENTWISE))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_step_of_a_subclass_is_computed_again(name: str, dtype: torch.dtype | None) -> None:
    own = layers(60, 4)
    optimizer = subclass(getattr(torch.optim, name), dtype)(own, lr=0.01)
    values, found = master_values.MasterValues(), []
    for _ in range(3):
        for each in own:
            each.grad = torch.randn_like(each)
        values.begin_step(optimizer)
        known = dict(values._before)
        optimizer.step()
        again = recomputed.after(optimizer, recomputed.base_of(optimizer), known[id(own[0])])[recomputed.WEIGHT]
        if dtype is None:
            assert torch.allclose(again, samples.sample(own[0]), rtol=1e-6, atol=1e-7)
        values.end_step(optimizer)
        found += values.found[id(optimizer)]
    assert [each.when for each in found][:1] == ([] if dtype is None else ["in the step"])
    assert all(each.match.to == "bf16" and each.row == "weights" for each in found)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("rounds", [None, lambda state: state.bfloat16(), lambda state: (state * 3).round() / 3])
def test_states_that_a_subclass_rounds_in_its_step(name: str, rounds: Any) -> None:
    class Own(getattr(torch.optim, name)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for states in self.state.values() if rounds is not None else ():
                for state in states.values():
                    if isinstance(state, torch.Tensor) and state.ndim:
                        state.copy_(rounds(state))

    own = layers(60, 4)
    optimizer = Own(own, lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))
    values, found = master_values.MasterValues(), []
    for _ in range(3):
        observed_step(values, optimizer, own)
        found += values.found[id(optimizer)]
    to_bf16 = rounds is not None and rounds(torch.ones(1)).dtype is torch.bfloat16
    assert {(each.row, each.when, each.match.to) for each in found} == (
        {("states", "in the step", "bf16")} if to_bf16 else set()
    )


def test_a_step_that_cannot_be_computed_again_is_a_suspicion() -> None:
    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for own in self.param_groups[0]["params"]:
                own.copy_((own - 0.01 * own.grad).bfloat16())

    own = layers(60)
    optimizer, values = Own(own, {}), master_values.MasterValues()
    own[0].grad = torch.randn_like(own[0])
    values.begin_step(optimizer)
    optimizer.step()
    values.end_step(optimizer)
    assert not values.found[id(optimizer)] and values.suspected[id(optimizer)] == {"bf16": 1}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_average_that_is_put_in_the_place_of_the_weights(dtype: torch.dtype | None) -> None:
    own = layers(60, 40)
    optimizer, values = torch.optim.AdamW(own, lr=0.01), master_values.MasterValues()
    mean = [each.detach().to(dtype or torch.float32) for each in own]
    for _ in range(2):
        observed_step(values, optimizer, own)
        with torch.no_grad():
            for average, each in zip(mean, own, strict=True):
                each.copy_(average.lerp_(each.to(average.dtype), 0.3))
    found = [str(each) for each in remarks.suspicions(values, optimizer, 2)]
    assert not values.found[id(optimizer)]
    assert ["values of bf16 only: an average" in each for each in found] == ([] if dtype is None else [True])


def resumed_weights(rebuild: Any, *, load: bool = True) -> list[str]:
    """Return the remarks at the first step after a checkpoint. rebuild: what makes the weights from those before."""
    own = layers(60, 40)
    first = torch.optim.AdamW(own, lr=0.01)
    for _ in range(3):
        for each in own:
            each.grad = torch.randn_like(each)
        first.step()
    again = [nn.Parameter(rebuild(each.detach())) for each in own]
    optimizer, values = torch.optim.AdamW(again, lr=0.01), master_values.MasterValues()
    if load:
        optimizer.load_state_dict(first.state_dict())
    for each in again:
        each.grad = torch.randn_like(each)
    values.begin_step(optimizer)
    optimizer.step()
    values.end_step(optimizer)
    return [str(each) for each in remarks.resumed(values.began_in[id(optimizer)], optimizer, 1)]


def test_weights_that_a_resumed_run_rebuilds_from_bf16_are_a_remark() -> None:
    (found,) = resumed_weights(lambda each: each.bfloat16().float())
    assert "after 3 steps" in found and "weights of AdamW began this run with values of bf16 only" in found
    assert resumed_weights(torch.clone) == []
    assert resumed_weights(lambda each: each.bfloat16().float(), load=False) == [], "a new run from a BF16 checkpoint"


def test_memory_that_is_replaced_keeps_what_was_left() -> None:
    own = layers(60)
    optimizer, values = torch.optim.SGD(own, 0.1), master_values.MasterValues()
    assert values.exchanged(optimizer) == []
    own[0].data = own[0].data.clone()
    assert values.exchanged(optimizer) == [], "with the same values"
    own[0].data = own[0].data.bfloat16().float()
    (found,) = values.exchanged(optimizer)
    assert (found.row, found.when, found.match.to) == ("weights", "since the last step", "bf16")
    own[0].data = torch.zeros(2, 3)
    assert values.exchanged(optimizer) == [], "of another shape"
