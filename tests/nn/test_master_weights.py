"""`master_weights: optimizer`: steps are those of FP32 parameters, with any optimizer, and are resumed bit by bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")

from torch import nn

from mpguard.core.errors import NotInForce
from mpguard.nn import master_weights
from mpguard.nn.master_weights import KEY, master_of

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2),
    "adamw fused": lambda own: torch.optim.AdamW(own, lr=1e-2, fused=True),
    "adamw foreach": lambda own: torch.optim.AdamW(own, lr=1e-2, foreach=True),
    "adam amsgrad": lambda own: torch.optim.Adam(own, lr=1e-2, amsgrad=True),
    "sgd momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "adagrad": lambda own: torch.optim.Adagrad(own, lr=1e-2),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda own: torch.optim.RMSprop(own, lr=1e-3),
    "lbfgs": lambda own: torch.optim.LBFGS(own, lr=0.05, max_iter=3),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(4, 16, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(2)]
    return itertools.cycle(pairs)


def train(model: nn.Module, optimizer: Any, data: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x, wanted = next(data)

        def closure(x: torch.Tensor = x, wanted: torch.Tensor = wanted) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x).float() - wanted).pow(2).mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    masters = ((master_of(a), master_of(b)) for a, b in pairs)
    return all(torch.equal(a, b) for a, b in pairs) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a.value, b.value))
        for a, b in masters
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_fp32_parameters_under_autocast(name: str) -> None:
    """A Linear alone casts weight and gradient, so that both runs have the same bits."""
    plain, model = network(), network()
    wanted = train(plain, OPTIMIZERS[name](plain.parameters()), batches(), 50)
    optimizer = OPTIMIZERS[name](model.parameters())
    assert master_weights.keep(optimizer) == 4
    found = train(model, optimizer, batches(), 50)
    assert found == wanted and found[-1] < found[0]
    for own, exact in zip(model.parameters(), plain.parameters(), strict=True):
        master = master_of(own)
        assert own.dtype is torch.bfloat16 and torch.equal(own, exact.bfloat16())
        assert master is not None and torch.equal(master.value, exact), "bit by bit"
    assert all(each.grad is None or each.grad.dtype is torch.bfloat16 for each in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_resumes_bit_by_bit(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    master_weights.keep(optimizer)
    train(model, optimizer, batches(), 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert all(saved[1]["state"][index][KEY].dtype is torch.float32 for index in range(4))
    resumed = network()
    other = OPTIMIZERS[name](resumed.parameters())
    master_weights.keep(other)
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    later = [batches(), batches()]
    assert train(model, optimizer, later[0], 5) == train(resumed, other, later[1], 5)
    assert same(model, resumed)


def test_small_updates_are_not_lost() -> None:
    model, half = network(), network().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    master_weights.keep(optimizer)
    before = [master_of(own).value.clone() for own in model.parameters()]  # type: ignore[union-attr]
    plain, rounded = torch.optim.SGD(half.parameters(), lr=1e-4), copy.deepcopy(half.state_dict())
    for each, steps in ((optimizer, model), (plain, half)):
        for _ in range(5):
            for own in steps.parameters():
                own.grad = torch.ones_like(own)
            each.step()
    moved = [(master_of(own).value - old) for own, old in zip(model.parameters(), before, strict=True)]  # type: ignore[union-attr]
    assert all(torch.allclose(each, torch.full_like(each, -5e-4), rtol=1e-3) for each in moved)
    lost = [torch.equal(own[own.abs() > 0.1], rounded[name][own.abs() > 0.1]) for name, own in half.named_parameters()]
    assert any(lost), "what masters are for"


def test_values_that_other_code_writes_are_taken_over() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    master_weights.keep(optimizer)
    weight = model[0].weight
    exact = master_of(weight).value.clone()
    with torch.no_grad():
        weight.data[0] = 3.0  # behind autograd's back
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    master = master_of(weight).value
    assert (master[0] == 3).all() and torch.equal(master[1:], exact[1:]), "the others keep all digits"
    assert (weight[0] == 3).all()
    model.float()  # exact, so that the masters keep all digits; the proof refuses the dtype
    optimizer.step()
    assert torch.equal(master_of(weight).value[1:], exact[1:]) and weight.dtype is torch.float32
    model.bfloat16()
    wide = {name: own.detach().float() + 1e-4 for name, own in model.named_parameters()}
    model.load_state_dict(wide)
    master_weights.loaded(model.named_parameters(), wide)
    assert torch.equal(master_of(weight).value, wide["0.weight"]), "FP32 values that are loaded keep their digits"


def test_parameters_that_stay_and_parameters_that_come_later() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert master_weights.keep(optimizer, without=frozenset(master_weights.sensitive(model.modules()))) == 4
    assert model[1].weight.dtype is torch.float32, "its kernel takes FP32 statistics"
    before = model[1].weight.detach().clone()
    losses = train(model, optimizer, batches(), 10)
    assert losses[-1] < losses[0] and not torch.equal(model[1].weight, before)
    late = nn.Linear(8, 8)
    optimizer.add_param_group({"params": late.parameters(), "lr": 1e-3})
    assert master_weights.keep(optimizer, without=frozenset(master_weights.sensitive(model.modules()))) == 6
    late.weight.grad = torch.ones_like(late.weight)
    optimizer.step()
    assert late.weight.dtype is torch.bfloat16 and set(optimizer.state) >= {late.weight}
    assert optimizer.param_groups[1]["params"] == list(late.parameters())


def test_join_gives_fp32_parameters_back() -> None:
    model, plain = network(), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    master_weights.keep(optimizer)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), batches(), 3)
    train(model, optimizer, batches(), 3)
    master_weights.join(model.parameters())
    assert all(own.dtype is torch.float32 and master_of(own) is None for own in model.parameters())
    assert all(torch.equal(own, exact) for own, exact in zip(model.parameters(), plain.parameters(), strict=True))
    optimizer.step()


def test_a_step_that_raises_leaves_the_parameters_in_their_groups() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    master_weights.keep(optimizer)

    def closure() -> Any:
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        optimizer.step(closure)
    losses = train(model, optimizer, batches(), 3)
    assert losses[-1] < losses[0]
    assert [id(own) for own in optimizer.param_groups[0]["params"]] == [id(own) for own in model.parameters()]


def test_gradients_of_several_passes_are_added_up_in_fp32() -> None:
    model, plain = network(), network()
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    master_weights.keep(optimizer)
    data = [next(batches()) for _ in range(8)]
    for steps, each in ((optimizer, model), (other, plain)):
        for x, wanted in data:
            with torch.autocast("cpu", torch.bfloat16):
                loss = (each(x).float() - wanted).pow(2).mean() / 8
            loss.backward()
        assert {own.grad.dtype for own in each.parameters()} == {torch.float32}
        steps.step()
        steps.zero_grad()
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_stay_where_parameters_are_exchanged(dtype: torch.dtype) -> None:
    """As `Module.to` does under `torch.__future__.set_swap_module_params_on_conversion`."""
    model, other = network(), network()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)]
    for optimizer in optimizers:
        master_weights.keep(optimizer)
    data = [batches(), batches()]
    for each, optimizer, own in zip((model, other), optimizers, data, strict=True):
        train(each, optimizer, own, 3)
    for parameter in model.parameters():
        with master_weights.exchanging(parameter):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(dtype)))
    for each, optimizer, own in zip((model, other), optimizers, data, strict=True):
        train(each, optimizer, own, 3)
    assert same(model, other) and all(master_of(each) is not None for each in model.parameters())


def test_models_are_copied_and_pickled_with_their_masters(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    master_weights.keep(optimizer)
    train(model, optimizer, batches(), 2)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert same(model, loaded)
    copied = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert all(master_of(own) is None for own in copied.parameters()), "an average of weights is no trained model"


class Remembering(torch.optim.Optimizer):
    """Updates parameters that it remembers itself."""

    def __init__(self, own: Any) -> None:
        self.mine = list(own)
        super().__init__(self.mine, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.mine:
                parameter.add_(parameter.grad, alpha=-0.1)


class RememberingFused(Remembering):
    """Updates them with a fused kernel, which does not count their versions up."""

    def step(self, closure: Any = None) -> None:
        zeros = [[torch.zeros_like(own) for own in self.mine] for _ in range(2)]
        steps = [torch.ones(()) for _ in self.mine]
        torch._fused_adamw_(
            self.mine, [own.grad.to(own.dtype) for own in self.mine], *zeros, [], steps, lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [Remembering, RememberingFused])
def test_an_optimizer_that_passes_its_groups_by_is_refused(kind: type[Remembering]) -> None:
    model = network()
    optimizer = kind(model.parameters())
    master_weights.keep(optimizer)
    for own in model.parameters():
        own.grad = torch.ones_like(own)
    with pytest.raises(NotInForce, match=f"{kind.__name__} updates parameters that it has kept itself"):
        optimizer.step()


def test_schedulers_scalers_and_clipping_work_as_before() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    master_weights.keep(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, wanted = next(batches())
    for number in range(3):
        loss = (model(x.bfloat16()).float() - wanted).pow(2).mean()
        scaler.scale(loss).backward()
        if number == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = master_of(model[0].weight).value.clone()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        assert norm.isfinite() == (number != 1) and model[0].weight.grad is None
        assert torch.equal(master_of(model[0].weight).value, before) == (number == 1), "an overflow skips the step"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)
