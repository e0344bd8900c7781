"""`mpguard.sensitivity`: batches of all kinds, what it returns, and what it refuses."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpguard  # noqa: E402


class Net(nn.Module):
    """Returns an output with a loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        found = self.down(self.up(x).relu())
        return types.SimpleNamespace(loss=(found - (x if y is None else y)).float().square().mean())


def _batches(count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 32, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: (x, x), lambda x: {"x": x, "y": x}])
def test_batches_of_all_kinds(kind: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    before = [own.clone() for own in model.parameters()]
    report = mpguard.sensitivity(model, map(kind, _batches()), every=1, formats=["nvfp4"])
    assert isinstance(report, mpguard.Sensitivity)
    assert sorted(layer.name for layer in report.measured) == ["down", "up"]
    assert report.formats == ["tensorwise", "nvfp4"]
    assert report.steps == 5
    assert all(own.grad is None and torch.equal(own, old) for own, old in zip(model.parameters(), before, strict=True))
    assert report.propose(bound=25.0).modules == ()


def test_a_loss_an_optimizer_and_a_policy_without_fp8() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    report = mpguard.sensitivity(
        compiled,
        _batches(),
        "bf16_mixed",
        loss=lambda own, x: own(x).float().square().mean(),
        optimizer=optimizer,
        steps=2,
    )
    assert report.recipe == "tensorwise"
    assert not torch.equal(model[0].weight, before)
    assert sorted(layer.name for layer in report.measured) == ["0", "2"]


@pytest.mark.parametrize(
    ("batches", "fields", "message"),
    [
        (_batches(1), {}, "nothing was measured in 1 batches"),
        ([torch.randn(4, 32)], {"loss": None, "model": nn.Linear(32, 32)}, "Linear returns no loss for a batch"),
        (_batches(), {"formats": ["mxfp9"]}, "there is no format mxfp9"),
    ],
)
def test_what_is_refused(batches: Any, fields: dict[str, Any], message: str) -> None:
    model = fields.pop("model", None) or Net()
    with pytest.raises(mpguard.ConfigError, match=message):
        mpguard.sensitivity(model, batches, **fields)
    assert not nn.modules.module._global_forward_hooks, "no hook is left"
