"""Gradients of several losses and scales: a step divides all of them by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

from mpguard.runtime.proof import scaled_passes
from mpguard.runtime.proof.scaled_passes import ScaledPasses


class Training:
    """A model with an optimizer and two scalers; what patches record is recorded here."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.passes = ScaledPasses()
        self.model, self.other = nn.Linear(8, 4), nn.Linear(4, 2)
        self.optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (self.model, self.other)]
        self.one, self.two = (torch.amp.GradScaler("cpu", init_scale=size) for size in (1024.0, 256.0))

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(3, 8)).pow(2).mean()

    def scale(self, scaler: torch.amp.GradScaler, loss: torch.Tensor) -> torch.Tensor:
        scaled = scaler.scale(loss)
        self.passes.loss_scaled(scaler, loss, scaled)
        return scaled

    def backward(self, loss: torch.Tensor, modules: tuple[str, ...] = ("model",)) -> None:
        leaves = [own for name in modules for own in getattr(self, name).parameters()]
        own = self.passes.begin_pass([loss], leaves, self.optimizers)
        loss.backward()
        self.passes.end_pass(own)

    def unscale(self, number: int = 0) -> None:
        self.one.unscale_(self.optimizers[number])
        self.passes.unscaled(self.optimizers[number])

    def step(self, scaler: Any = None, number: int = 0) -> str:
        return self.passes.step(scaler or self.one, self.optimizers[number])


def two_scalers(t: Training) -> str:
    t.backward(t.scale(t.one, t.loss()))
    t.backward(t.scale(t.two, t.loss()))
    return t.step()


def another_scaler_steps(t: Training) -> str:
    t.backward(t.scale(t.two, t.loss()))
    return t.step()


def scaled_twice(t: Training) -> str:
    t.backward(t.scale(t.two, t.scale(t.one, t.loss()) / 4))
    return t.step(t.two)


def unscaled_between_passes(t: Training) -> str:
    t.backward(t.scale(t.one, t.loss()))
    t.unscale()
    t.backward(t.scale(t.one, t.loss()))
    return t.step()


def scaled_in_part(t: Training) -> str:
    t.backward(t.scale(t.one, t.loss()) + t.loss())
    return t.step()


def penalty_that_is_not_scaled(t: Training) -> str:
    penalty = sum(own.square().sum() for own in t.model.parameters())
    t.backward(t.loss() - (-t.scale(t.one, t.loss())) - penalty)
    return t.step()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (scaled_in_part, scaled_passes.PARTLY),
        (penalty_that_is_not_scaled, scaled_passes.PARTLY),
        (two_scalers, scaled_passes.OTHER),
        (another_scaler_steps, scaled_passes.OTHER),
        (scaled_twice, scaled_passes.TWICE),
        (unscaled_between_passes, scaled_passes.LATE),
    ],
)
def test_gradients_with_another_scale_than_the_step_divides_by(program: Callable[[Training], str], found: str) -> None:
    training = Training()
    assert program(training) == found and found in scaled_passes.ADVICE
    assert training.step() == "", "a step ends what was known"


def accumulated(t: Training) -> str:
    for _ in range(3):
        t.backward(t.scale(t.one, t.loss() / 3))
    t.unscale()
    return t.step()


def divided_between(t: Training) -> str:
    t.backward(t.scale(t.one, t.scale(t.two, t.loss()) / t.two.get_scale()))
    return t.step()


def two_losses_of_one_pass(t: Training) -> str:
    t.backward(t.scale(t.one, t.loss()) + t.scale(t.one, t.loss()))
    return t.step()


def scaled_by_the_script(t: Training) -> str:
    t.backward(t.scale(t.one, t.loss()) + t.loss() * t.one.get_scale())
    return t.step()


def term_of_another_optimizer(t: Training) -> str:
    """What another optimizer steps is not divided."""
    t.backward(t.scale(t.one, t.loss()) + t.other(torch.randn(3, 4)).mean(), modules=("model", "other"))
    return t.step()


def set_to_zero(t: Training, *, to_none: bool = False) -> str:
    """The generator's pass of a GAN leaves gradients in the discriminator, which has a scaler of its own."""
    t.backward(t.scale(t.two, t.loss()))
    t.passes.unscaled(t.optimizers[0])
    t.optimizers[0].zero_grad(set_to_none=to_none)
    t.backward(t.scale(t.one, t.loss()))
    return t.step()


def set_to_none(t: Training) -> str:
    return set_to_zero(t, to_none=True)


def penalty(t: Training) -> str:
    """The gradient penalty of PyTorch's AMP examples."""
    x = torch.randn(3, 8, requires_grad=True)
    (made,) = torch.autograd.grad(t.scale(t.one, t.model(x).pow(2).mean()), [x], create_graph=True)
    t.backward(t.scale(t.one, t.loss() + (made / t.one.get_scale()).pow(2).sum()))
    return t.step()


def an_optimizer_each(t: Training) -> str:
    t.backward(t.scale(t.one, t.loss()))
    t.backward(t.scale(t.two, t.other(torch.randn(2, 4)).sum()), ("other",))
    return t.step() + t.step(t.two, 1)


@pytest.mark.parametrize(
    "program",
    [
        accumulated,
        divided_between,
        two_losses_of_one_pass,
        set_to_zero,
        set_to_none,
        penalty,
        an_optimizer_each,
        scaled_by_the_script,
        term_of_another_optimizer,
    ],
)
def test_programs_whose_step_divides_by_the_scale_of_its_gradients(program: Callable[[Training], str]) -> None:
    training = Training()
    for _ in range(2):
        assert program(training) == ""
        for each in training.optimizers:
            each.zero_grad()
        for scaler in (training.one, training.two):
            scaler.scale(torch.ones(1))
            scaler.update(scaler.get_scale())


def test_what_clipping_finds_is_still_scaled() -> None:
    training, own = Training(), lambda: list(training.model.parameters())
    training.backward(training.scale(training.one, training.loss()))
    assert training.passes.scale_of(own()) == 1024.0
    training.unscale()
    assert training.passes.scale_of(own()) == 0.0 and training.passes.scale_of([nn.Parameter(torch.ones(2))]) == 0.0
