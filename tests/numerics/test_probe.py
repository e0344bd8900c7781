"""The probe: which layers it measures at which step, what it keeps, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mpguard.nn import layer_error  # noqa: E402
from mpguard.nn.fp8 import filters  # noqa: E402
from mpguard.numerics.probe import CONTAINMENT, Probe, ProbeSettings  # noqa: E402
from mpguard.policy.recipes import recipe  # noqa: E402

POLICY = recipe("bf16_with_fp8_current_scaling_mixed")
FORMATS = ("bf16", "tensorwise", "nvfp4")


class Net(nn.Module):
    def __init__(self, layers: int = 8, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.lm_head = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.lm_head(x)


@pytest.fixture(autouse=True)
def nothing_has_failed() -> Any:
    CONTAINMENT.forget()
    yield
    assert not CONTAINMENT.has_failed()


def trained(
    model: nn.Module,
    count: int,
    batch: Callable[[int], torch.Tensor] | None = None,
    probed: bool = True,
    passes: int = 1,
    **more: Any,
) -> list[dict[str, Any]]:
    """Train a model with a probe; return its lines."""
    lines: list[dict[str, Any]] = []
    rank = {name: more.pop(name) for name in ("rank", "ranks") if name in more}
    probe = Probe(ProbeSettings(FORMATS, POLICY, **{"steps": 50, **more}), lines.append, **rank)
    if probed:
        probe.find_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for step in range(count):
        for _ in range(passes):
            model(torch.randn(64, 32) if batch is None else batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if probed:
            assert probe.step_ended(lambda: [model])
            assert not probe.step_ended(lambda: [model]), "a step without a backward pass is none"
    probe.close()
    return lines


def measured(lines: list[dict[str, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in lines:
        if line["event"] == "layer":
            assert "weight_gradient" in line
            found.setdefault(line["step"], []).append(line["layer"])
    return found


def test_layers_take_turns() -> None:
    torch.manual_seed(0)
    lines = trained(Net(), 9)
    assert [each["layer"] for each in lines[0]["layers"]] == [*(f"layers.{i}" for i in range(8)), "lm_head"]
    assert {each["layer"]: each["left_out"] for each in lines[0]["layers"]}["lm_head"] == filters.EXCLUDED
    found = measured(lines)
    assert 1 not in found, "the first step finds the layers"
    assert all(2 <= len(names) <= 3 for names in found.values())
    for first in (2, 6):
        turns = sorted(name for step in range(first, first + 4) for name in found[step])
        assert turns == sorted([*(f"layers.{i}" for i in range(8)), "lm_head"]), "each layer once in four steps"


def test_ranks_measure_different_layers() -> None:
    torch.manual_seed(0)
    model = Net()
    ranks = [measured(trained(model, 5, rank=rank, ranks=2)) for rank in (0, 1)]
    for step in range(2, 6):
        assert not set(ranks[0][step]) & set(ranks[1].get(step, ()))
    names = [name for rank in ranks for step in range(2, 6) for name in rank.get(step, ())]
    assert sorted(names) == sorted([*(f"layers.{i}" for i in range(8)), "lm_head"])


def test_the_numbers_are_those_of_the_layer() -> None:
    torch.manual_seed(0)
    model = Net(layers=1)
    batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(7))
    weight = model.layers[0].weight.detach().clone()
    lines = trained(model, 1, lambda _: batch)
    assert measured(lines) == {}
    after = model.layers[0].weight.detach().clone()
    lines = trained(model, 2, lambda _: batch, every=1)
    own = next(line for line in lines if line["event"] == "layer" and line["layer"] == "layers.0")
    assert not torch.equal(weight, after)
    kept = layer_error.keep(batch)
    expected = layer_error.output_errors(kept, model.layers[0].weight.detach(), FORMATS)
    assert own["output"]["nvfp4"]["snr"] == pytest.approx(expected["nvfp4"].snr, abs=0.5)
    assert own["rows"] == 64


def test_training_is_the_same_bit_for_bit() -> None:
    states = []
    for probed in (True, False):
        torch.manual_seed(0)
        model = Net()
        trained(model, 6, probed=probed)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_it_stops_after_its_steps() -> None:
    torch.manual_seed(0)
    found = measured(trained(Net(), 9, steps=3, skip=2))
    assert sorted(found) == [3, 4, 5]


def test_of_several_passes_the_first_is_measured() -> None:
    torch.manual_seed(0)
    lines = trained(Net(layers=2), 3, passes=3, every=1)
    assert {step: len(names) for step, names in measured(lines).items()} == {2: 3, 3: 3}
    assert lines[0]["layers"][0]["rows"] == 3 * 64, "all rows of a step count for the share of the matmuls"


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda given, own=layer: own(given).relu(), x, use_reentrant=reentrant)
            return self.lm_head(x)

    torch.manual_seed(0)
    found = measured(trained(Checkpointed(), 5, lambda _: torch.randn(64, 32, requires_grad=True)))
    assert sorted(name for names in found.values() for name in names) == sorted(
        [*(f"layers.{i}" for i in range(8)), "lm_head"]
    )


def test_a_frozen_weight_has_no_weight_gradient() -> None:
    torch.manual_seed(0)
    model = Net(layers=2)
    model.layers[1].weight.requires_grad_(False)
    lines = trained(model, 2, every=1)
    frozen = next(line for line in lines if line["event"] == "layer" and line["layer"] == "layers.1")
    assert frozen["weight_gradient"]["tensorwise"]["snr"] is None
    assert frozen["weight_gradient"]["tensorwise"]["operands"]["gradient"]["snr"] > 10


def test_layers_that_get_no_gradient_are_not_layers_of_the_run() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    torch.manual_seed(0)
    lines = trained(Teacher(), 3, every=1)
    assert [each["layer"] for each in lines[0]["layers"]] == ["student"]


def test_a_pass_whose_gradients_are_infinite_is_measured_again() -> None:
    torch.manual_seed(0)
    model = Net(layers=1)
    lines: list[dict[str, Any]] = []
    probe = Probe(ProbeSettings(FORMATS, POLICY, every=1), lines.append)
    probe.find_layers()
    for scales in ((1.0,), (float("inf"), 1.0)):
        for scale in scales:
            (model(torch.randn(64, 32)).square().mean() * scale).backward()
        probe.step_ended(lambda: [model])
    probe.close()
    own = [line for line in lines if line["event"] == "layer"]
    assert len(own) == 2
    assert all(line["weight_gradient"]["tensorwise"]["snr"] > 10 for line in own)


def test_an_expert_without_tokens_and_a_conv1d() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert, self.conv = nn.Linear(32, 32), Conv1D(48, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) + self.expert(x[:0]).sum()

    torch.manual_seed(0)
    lines = trained(Mixed(), 2, every=1)
    own = {line["layer"]: line for line in lines if line["event"] == "layer"}
    assert list(own) == ["conv"]
    assert own["conv"]["output"]["tensorwise"]["snr"] == pytest.approx(28.5, abs=1)


def test_names_of_two_models() -> None:
    from mpguard.numerics.probe import _named

    one, other = Net(layers=1), Net(layers=1)
    names = _named([one, other])
    assert sorted(names.values()) == ["Net: layers.0", "Net: lm_head", "layers.0", "lm_head"]


def test_a_model_that_the_first_optimizer_does_not_train_keeps_its_own_names() -> None:
    """A GAN: the discriminator steps first, and the generator has layers of the same names."""
    models = [nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))]
    lines: list[dict[str, Any]] = []
    probe = Probe(ProbeSettings(["bf16"], POLICY, steps=1), lines.append)
    probe.find_layers()
    for model in models:
        model(torch.randn(32, 32)).sum().backward()
    probe.step_ended(lambda: [models[1]])
    probe.close()
    assert {(each["layer"], each["left_out"]) for each in lines[0]["layers"]} == {
        ("0", ""),
        ("Sequential: 0", "of another model"),
    }
