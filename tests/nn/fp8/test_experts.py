"""The experts of transformers' mixtures in FP8 (`fp8_experts`), computed in software."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")
transformers = pytest.importorskip(
    "transformers", minversion="5.2", reason="before, experts call torch's operator themselves"
)
pytest.importorskip("torchao", reason="the real library runs here")

from torch import nn

import mpguard
from mpguard.nn.fp8 import experts, filters
from mpguard.policy import hardware

POLICY = mpguard.Policy(
    bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True, fp8_experts=True, fp8_exclude=("*_proj*", "*lm_head")
)

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "use_cache": False, "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
_SMALL: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

#: Architectures whose experts differ: with shared ones, biases and clamped gates, transposed weights, without a gate.
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**_SMALL, "num_experts": 8, "head_dim": 16},
    "DeepseekV3": {
        **_SMALL, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 16,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}  # fmt: skip


def model(name: str = "Mixtral", **changes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **MODELS[name], **changes})
    torch.manual_seed(0)
    built = getattr(transformers, f"{name}ForCausalLM")(config)
    for own in built.parameters():  # so that experts matter in a model that small
        if own.ndim == 3:
            own.data.normal_(std=0.1)
    return built


def mixtures(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if filters.is_experts(module)]


def loss_of(net: Any, number: int = 0, length: int = 13) -> torch.Tensor:
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = net(input_ids=ids, labels=ids).loss
    return loss


def flat_gradient(net: nn.Module) -> torch.Tensor:
    return torch.cat([own.grad.flatten() for own in net.parameters() if own.grad is not None])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_those_of_bf16_within_the_error_of_fp8(name: str) -> None:
    # One layer: in a second one, roundings of the first send some tokens to other experts.
    plain, net = (model(name, num_hidden_layers=1) for _ in range(2))
    classes = [type(each) for each in mixtures(net)]
    done = mpguard.convert(net, POLICY)
    found = mixtures(net)
    assert found and all(isinstance(each, experts.Fp8Experts) for each in found)
    assert [reason for _, reason in done.experts] == [""] * len(found)
    assert f"experts in FP8 in {len(found)} of {len(found)} modules" in str(done)
    assert done.others == (), "nothing else multiplies"
    routers = [each for each, _ in done.skipped if each.endswith((".gate", ".router"))]
    assert not any(each in done.converted for each in routers)
    losses = loss_of(net), loss_of(plain)
    for loss in losses:
        loss.backward()
    assert losses[0] != losses[1] and torch.allclose(*losses, rtol=1e-2)
    for (key, own), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        if "mlp.experts." in key:
            assert difference(own.grad, other.grad) < 0.15, key
    assert difference(*(flat_gradient(each) for each in (net, plain))) < 0.1
    names = plain.state_dict().keys()
    assert net.state_dict().keys() == names
    mpguard.revert(net)
    assert [type(each) for each in found] == classes and torch.equal(loss_of(net), loss_of(plain))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(5, 0, 16, 1), (0, 0, 0, 1), (33, 17, 64, 48)])
def test_each_row_meets_the_matrix_of_its_group_as_torchao_rounds_them(sizes: Any, transposed: bool) -> None:
    """Also empty groups, single rows, and rows behind the last group (of other ranks, with expert parallelism)."""
    behind = 3
    torch.manual_seed(0)
    rows, inputs, outputs = sum(sizes) + behind, 32, 48
    x = torch.randn(rows, inputs, requires_grad=True)
    stacked = torch.randn(len(sizes), *((inputs, outputs) if transposed else (outputs, inputs)), requires_grad=True)
    weight = stacked if transposed else stacked.transpose(-2, -1)
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
    out = experts._product(True)(x, weight, ends)
    assert out.shape == (rows, outputs) and out.dtype == torch.float32
    weights = torch.randn(rows - behind, outputs)
    (out[: rows - behind] * weights).sum().backward()

    exact = weight.detach().bfloat16() if transposed else weight.detach()
    wanted, for_x, for_w = by_torchao(x.detach(), exact, sizes, weights)
    assert torch.allclose(out[: rows - behind], wanted, rtol=1e-2, atol=1e-2)
    assert x.grad is not None and stacked.grad is not None
    assert torch.allclose(x.grad[: rows - behind], for_x, rtol=1e-2, atol=2e-2)
    own = stacked.grad if transposed else stacked.grad.transpose(-2, -1)
    assert torch.allclose(own, for_w, rtol=1e-2, atol=2e-2)


def by_torchao(x: Any, weight: Any, sizes: Any, gradient: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matmuls group by group, with torchao's own functions for scales and rounding."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    def rounded(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        scale = tensor_to_scale(
            tensor, torch.float8_e4m3fn, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=dimension,
            round_scales_to_power_of_2=True,
        )  # fmt: skip
        return to_fp8_saturated(tensor.float() * scale, torch.float8_e4m3fn).float() / scale

    outs, for_x, for_w, start = [], [], [], 0
    gradient = gradient.bfloat16()
    for number, size in enumerate(sizes):
        own, its = x[start : start + size], gradient[start : start + size]
        start += size
        if not size:
            for_w.append(torch.zeros(x.shape[1], gradient.shape[1]))
            continue
        outs.append(rounded(own, -1) @ rounded(weight[number], 0))
        for_x.append(rounded(its, -1) @ rounded(weight[number], -1).t())
        for_w.append(rounded(own, 0).t() @ rounded(its, 0))
    return torch.cat(outs), torch.cat(for_x), torch.stack(for_w)


def test_no_rows_at_all() -> None:
    x, weight = torch.randn(0, 32, requires_grad=True), torch.randn(4, 16, 32, requires_grad=True)
    out = experts._product(True)(x, weight.transpose(-2, -1), torch.zeros(4, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, 16) and weight.grad is not None and not weight.grad.any()


def test_compiled_they_are_the_same_for_each_length() -> None:
    net = model(num_hidden_layers=1)
    mpguard.convert(net, POLICY)
    whole = copy.deepcopy(net)
    whole.model.compile(backend="aot_eager", fullgraph=True)
    for length in (13, 7, 16):
        for each in (net, whole):
            each.zero_grad()
            loss_of(each, length=length).backward()
        for own, other in zip(mixtures(net), mixtures(whole), strict=True):
            assert torch.equal(own.gate_up_proj.grad, other.gate_up_proj.grad), length


def test_copies_pickles_checkpoints_and_recomputation() -> None:
    net = model()
    mpguard.convert(net, POLICY)
    loss = loss_of(net)
    loss.backward()
    wanted = [own.grad for own in net.parameters()]
    again = pickle.loads(pickle.dumps(net))
    again.zero_grad()
    again.gradient_checkpointing_enable()
    again.train()
    recomputed = loss_of(again)
    recomputed.backward()
    assert torch.equal(recomputed, loss) and isinstance(mixtures(again)[0], experts.Fp8Experts)
    assert all(torch.equal(own.grad, other) for own, other in zip(again.parameters(), wanted, strict=True))
    fresh = model()
    fresh.load_state_dict(copy.deepcopy(net).state_dict())
    assert type(mixtures(mpguard.revert(again))[0]) is type(mixtures(fresh)[0])


def test_another_implementation_is_that_of_transformers() -> None:
    """`generate` multiplies single tokens in another way; a run that does so all the time has a reason in its proof."""
    net, plain = model(), model()
    mpguard.convert(net, POLICY)
    for each in (net, plain):
        each.set_experts_implementation("batched_mm")
    assert torch.equal(loss_of(net), loss_of(plain))
    reasons = experts.reasons(list(net.named_modules()), POLICY)
    assert {reasons[id(each)] for each in mixtures(net)} == {
        "are computed by the implementation batched_mm; call model.set_experts_implementation('grouped_mm')"
    }


def test_what_is_left_out_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(net: Any, **changes: Any) -> list[str]:
        return [reason for _, reason in mpguard.convert(net, POLICY.replace(**changes)).experts]

    assert reasons(model(), fp8_exclude=("*layers.0*experts",)) == ["fp8_exclude", ""]
    assert reasons(model(), fp32_modules=("*layers.1.mlp",)) == ["", "fp32_modules"]
    ends = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 1}
    assert reasons(model(), **ends) == ["", "first_last_layers_bf16"]
    odd = {"fp8_exclude": (), "fp8_required": False}
    assert reasons(model(intermediate_size=24), **odd) == ["24 is no multiple of 16"] * 2
    own = model()
    mixtures(own)[0].forward = mixtures(own)[0].forward
    assert reasons(own) == ["have a forward of their own, set on the instance", ""]
    done = mpguard.convert(model(), POLICY.replace(fp8_experts=False, fp8_exclude=()))
    assert done.experts == () and "stay in bf16 (fp8_experts: true computes experts in FP8)" in str(done)
    with pytest.raises(mpguard.PolicyError, match=r"`\*expert_\*` matches no Linear layer"):
        mpguard.convert(model(), POLICY.replace(fp8_exclude=("*expert_*",)))
    half = mpguard.Policy(fp16=True, fp8="hybrid", fp8_emulate=True, fp8_experts=True)
    assert "the policy computes in fp16" in mpguard.convert(model(), half).experts[0][1]

    modules = list(model().named_modules())
    for name, capability, wanted in (
        ("NVIDIA L40S", (8, 9), "needs compute capability 9.0 or higher for FP8 matmuls of experts (NVIDIA L40S"),
        ("NVIDIA B200", (10, 0), "not available from compute capability 10.0 on"),
        ("NVIDIA H200", (9, 0), "needs torchao 0.18 and Triton"),
    ):
        machine = hardware.Hardware(name, capability, 1, (13, 0), {"torchao": "0.18.0"})
        monkeypatch.setattr(hardware, "detect", lambda machine=machine: machine)
        found = set(experts.reasons(modules, POLICY.replace(fp8_emulate=False)).values())
        assert len(found) == 1 and wanted in found.pop()


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "rowwise_with_gw_hp"])
def test_a_recipe_that_experts_do_not_have_is_refused_for_experts_alone(recipe: str) -> None:
    asked = POLICY.replace(fp8_exclude=("*lm_head",), fp8_modules=[{"pattern": "*.experts", "recipe": recipe}])
    net = model()
    with pytest.raises(mpguard.PolicyError, match=r"all that it decides are experts .*; write rowwise or none"):
        mpguard.convert(net, asked)
    assert type(net.model.layers[0].mlp.experts).__name__ == "MixtralExperts", "nothing was changed"
    own = asked.replace(fp8_modules=[{"pattern": "*.experts", "recipe": "rowwise"}, {"pattern": "*", "recipe": recipe}])
    assert "experts in FP8 in 2 of 2 modules" in str(mpguard.convert(net, own)), "a pattern of Linear layers as well"


def test_a_model_without_experts_imports_no_prototype(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(experts, "_missing", lambda _policy: looks.append(1) or "")
    assert experts.reasons(list(nn.Sequential(nn.Linear(16, 16)).named_modules()), POLICY) == {} and not looks
    assert experts.reasons(list(model().named_modules()), POLICY) and looks


def test_only_experts_in_fp8_train_as_in_bf16() -> None:
    """Their weights are saved for the backward pass as they are, without the copy that autocast makes."""
    losses = []
    for fp8 in (False, True):
        net = model()
        if fp8:
            done = mpguard.convert(net, POLICY)
            assert done.converted == () and len(done.experts) == 2
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for number in range(10):
            loss = loss_of(net, number % 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[0] < 4.0
    stored: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (stored.append(each), each)[1], lambda each: each):
        loss_of(net)
    own = {each.untyped_storage().data_ptr() for each in net.parameters()}
    stacked = [each for each in stored if each.ndim == 3 and each.shape[0] == 4]
    assert stacked and all(each.untyped_storage().data_ptr() in own for each in stacked)


def test_a_converted_model_is_refused_under_another_policy() -> None:
    net = model()
    mpguard.convert(net, POLICY)
    assert mpguard.convert(net, POLICY).already == () and len(mixtures(net)) == 2
    with pytest.raises(mpguard.PolicyError, match="is FP8 already"):
        mpguard.convert(net, POLICY.replace(fp8_fast_accum=True))


def test_positions_are_no_experts() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.config = nn.Parameter(torch.zeros(4, 32, 32)), None

    assert not filters.is_experts(Embedded()) and not filters.is_linear(Embedded())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_no_experts() -> None:
    """Its class has a descriptor in place of `forward`, which raises."""
    assert not filters.is_experts(torch.jit.script(nn.Linear(16, 16)))
