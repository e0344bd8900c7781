"""`fp8_calibration`: delayed scaling begins with the scales of its own tensors.

With delayed scaling in software (fake_delayed_scaling.py); with Transformer Engine: tests/gpu/test_opt_ins_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import fake_delayed_scaling
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpguard
from mpguard.core.errors import PolicyError
from mpguard.nn.fp8 import calibration
from mpguard.nn.fp8 import convert as conversion
from mpguard.nn.fp8.amax_history import AmaxHistoryMixin
from mpguard.policy.policy import Policy
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks import compare
from mpguard.runtime.proof.fp8 import find_fp8_layers
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict

PLAIN = fake_delayed_scaling.POLICY
CALIBRATED = PLAIN.replace(fp8_calibration=True)


@pytest.fixture(autouse=True)
def _software(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(conversion, "_library", fake_delayed_scaling.te_or_torchao)
    yield


class Network(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(self.call(block, x))
        return x


def network(policy: Policy | None, call: Callable[..., torch.Tensor] | None = None) -> Network:
    torch.manual_seed(0)
    model = Network(call)
    if policy is not None:
        assert len(mpguard.convert(model, policy).converted) == 3
    return model


def gradients(model: nn.Module, scale: float = 1e-7) -> list[torch.Tensor]:
    """The gradients of one pass over small inputs, with a loss as small as a mean over many tokens makes gradients."""
    model.zero_grad()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * 0.01
    x.requires_grad_()  # a reentrant checkpoint needs it
    (model(x).square().sum() * scale).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((own - other).norm() / other.norm()) for own, other in zip(found, exact, strict=True))


def test_the_first_gradients_are_not_lost() -> None:
    exact = gradients(network(None))
    assert error(gradients(network(PLAIN)), exact) == 1.0, "all of a gradient is rounded to zero with scales of 1"
    assert error(gradients(network(CALIBRATED)), exact) < 0.2


def test_later_passes_are_those_of_delayed_scaling() -> None:
    calibrated, plain = network(CALIBRATED), network(PLAIN)
    for _ in range(8):  # until the plain one has forgotten its first passes
        found, uncalibrated = gradients(calibrated), gradients(plain)
    assert error(found, uncalibrated) == 0.0
    history, other = mpguard.fp8_state_dict(calibrated), mpguard.fp8_state_dict(plain)
    assert all(torch.equal(history[name]["scale_fwd"], other[name]["scale_fwd"]) for name in history)


def test_a_checkpoint_gets_the_scales_of_a_pass_without_it() -> None:
    found = gradients(network(CALIBRATED))
    for reentrant in (True, False):
        call = lambda block, x, way=reentrant: checkpoint(block, x, use_reentrant=way)  # noqa: E731
        assert error(gradients(network(CALIBRATED, call)), found) == 0.0, reentrant


def test_evaluation_before_training_does_not_use_up_the_calibration() -> None:
    model = network(CALIBRATED)
    with torch.no_grad():
        model(torch.randn(16, 32) * 1e4)
    assert error(gradients(model), gradients(network(CALIBRATED))) == 0.0


def test_a_model_that_is_one_checkpoint_is_calibrated() -> None:
    for reentrant in (True, False):
        model = network(CALIBRATED)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        assert [row.found for row in rows(model, CALIBRATED)] == ["3 of 3 layers"], reentrant


def test_a_loaded_history_is_kept() -> None:
    trained = network(CALIBRATED)
    gradients(trained)
    state = trained.state_dict()
    resumed = network(CALIBRATED)
    resumed.load_state_dict(state)
    assert error(gradients(resumed, 1.0), gradients(trained, 1.0)) == 0.0, "and no calibration with these gradients"


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_tensor_without_a_scale_leaves_the_first_one(value: float) -> None:
    layer = network(CALIBRATED).blocks[0]
    assert isinstance(layer, AmaxHistoryMixin)
    calibration.scale_forward(layer, torch.full((16, 32), value))
    of_input, of_weight = layer.history()["scale_fwd"]
    assert of_input == 1.0
    assert of_weight == pytest.approx(448 / float(layer.weight.detach().abs().max()))  # type: ignore[operator,union-attr]


def test_a_layer_that_begins_with_zeros_is_calibrated_when_it_has_values() -> None:
    model, exact = network(CALIBRATED), network(None)
    for each in (model, exact):
        with torch.no_grad():
            each.blocks[2].weight.zero_()  # type: ignore[operator,union-attr]
        gradients(each)  # all gradients before the last layer are zero
        with torch.no_grad():
            each.blocks[2].weight.normal_(generator=torch.Generator().manual_seed(2))  # type: ignore[operator,union-attr]
    assert error(gradients(model), gradients(exact)) < 0.2


def test_a_checkpoint_from_before_the_first_gradient_leaves_the_calibration() -> None:
    begun = network(CALIBRATED)
    with torch.no_grad():
        begun(torch.randn(16, 32))
    resumed = network(CALIBRATED)
    resumed.load_state_dict(begun.state_dict())
    assert error(gradients(resumed), gradients(network(None))) < 0.2


def test_a_layer_that_is_first_called_later_is_calibrated_then() -> None:
    model = network(CALIBRATED)
    mpguard.fp8_state_dict(model)  # allocates all histories
    last, model.blocks = model.blocks[2], model.blocks[:2]
    gradients(model)
    assert not last._mpguard_fp8.calibrated_forward  # type: ignore[union-attr]
    model.blocks.append(last)
    exact = gradients(network(None))
    assert error(gradients(model)[-2:], exact[-2:]) < 0.2


def test_calls_of_one_layer_in_its_first_pass_share_the_lower_scale() -> None:
    """An activation checkpoint computes both again with the scale that the layer has then."""
    layer = network(CALIBRATED).blocks[0]
    assert isinstance(layer, AmaxHistoryMixin)
    for value in (0.01, 100.0, 0.01):
        calibration.scale_forward(layer, torch.full((16, 32), value))
    assert layer.history()["scale_fwd"][0] == pytest.approx(4.48)


def test_weights_that_an_engine_keeps_as_attributes_are_calibrated() -> None:
    """As FSDP1 does with `use_orig_params=False`."""
    layer = network(CALIBRATED).blocks[0]
    assert isinstance(layer, AmaxHistoryMixin)
    weight = layer._parameters.pop("weight")
    object.__setattr__(layer, "weight", weight)
    calibration.scale_forward(layer, torch.ones(16, 32))
    assert layer.history()["scale_fwd"][1] > 1


def test_scales_from_inference_mode_can_be_set() -> None:
    layer = network(CALIBRATED).blocks[0]
    assert isinstance(layer, AmaxHistoryMixin)
    with torch.inference_mode():
        layer.memory = {name: torch.ones_like(each) for name, each in layer.history().items()}  # type: ignore[assignment]
        layer.memory["amax_history_fwd"].zero_()  # type: ignore[index,operator,union-attr]
    calibration.scale_forward(layer, torch.full((16, 32), 2.0))
    assert layer.history()["scale_fwd"][0] == 224.0


def rows(model: nn.Module, policy: Policy) -> list[Row]:
    fp8 = find_fp8_layers(list(model.named_modules()), policy, [])
    return [row for row in compare(Observed(fp8=fp8), Plan(policy)) if row.name == "fp8 calibration"]


def test_the_proof_shows_which_layers_began_calibrated() -> None:
    model = network(CALIBRATED)
    assert [row.verdict for row in rows(model, CALIBRATED)] == [Verdict.UNPROVEN]
    gradients(model)
    assert [(row.found, row.verdict) for row in rows(model, CALIBRATED)] == [("3 of 3 layers", Verdict.AS_ASKED)]
    assert rows(model, PLAIN) == []
    plain = network(PLAIN)
    gradients(plain)
    assert [row.verdict for row in rows(plain, CALIBRATED)] == [Verdict.WRONG], "layers that were not calibrated"


def test_only_delayed_scaling_has_first_scales() -> None:
    with pytest.raises(PolicyError, match="fp8_calibration=True has no effect here; it needs fp8 with fp8_recipe del"):
        mpguard.Policy(bf16=True, fp8="hybrid", fp8_calibration=True)
