"""`mpguard.convert` and `revert`, with torchao's real layers in software: what changes, and what must not."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torchao", reason="the real library runs here")

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch.distributed.device_mesh import init_device_mesh

import mpguard
from mpguard.nn.fp8 import filters, padding
from mpguard.nn.fp8.torchao import TorchaoFloat8Linear
from mpguard.policy.policy import Policy

FP8 = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)
ROWWISE = Policy(bf16=True, fp8="e4m3", fp8_recipe="rowwise", fp8_emulate=True)
HIGH = Policy(bf16=True, fp8="e4m3", fp8_recipe="rowwise_with_gw_hp", fp8_emulate=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*(padded to|on padding).*:mpguard.MpguardWarning")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """A small language model whose head shares the embedding's weight."""

    def __init__(self, blocks: int = 3, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.projection = nn.Linear(width, width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.output(self.projection(x))
        return y


def model(**sizes: int) -> Model:
    torch.manual_seed(0)
    return Model(**sizes)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> list[float]:
    """Predicts each token's successor; the losses."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (4, 12))
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reasons(net: nn.Module, policy: Policy = FP8) -> dict[str, str]:
    """Why layers stay, by name, without converting anything."""
    found = filters.reasons(list(net.named_modules()), policy)
    return {name: found[id(module)] for name, module in net.named_modules() if id(module) in found}


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FP8, ROWWISE, HIGH], ids=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("first", ["convert", "optimizer"])
def test_a_converted_model_trains_all_its_parameters(policy: Policy, first: str) -> None:
    """Also where the optimizer was built before: none of its parameters is dead."""
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2) if first == "optimizer" else None
    done = mpguard.convert(net, policy)
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = train(net, optimizer)
    assert len(done.converted) == 7 and losses[-1] < 0.5 * losses[0]
    assert [name for name, value in net.state_dict().items() if torch.equal(value, before[name])] == []
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert held == {id(each) for each in net.parameters()}


def test_the_loss_is_near_that_of_bf16() -> None:
    losses = []
    for fp8 in (False, True):
        net = model()
        if fp8:
            mpguard.convert(net, FP8)
        losses.append(train(net, torch.optim.AdamW(net.parameters(), lr=3e-3), steps=20)[-5:])
    gaps = [abs(one - other) / one for one, other in zip(*losses, strict=True)]
    assert 0 < max(gaps) < 0.05


def test_the_products_really_are_in_fp8() -> None:
    layer = nn.Linear(32, 32, bias=False)
    inputs = torch.randn(16, 32)
    plain = layer(inputs)
    mpguard.convert(layer, FP8)
    fp8 = layer(inputs)
    scale = 448 / inputs.abs().max(), 448 / layer.weight.abs().max()
    rounded = [
        ((value * factor).to(torch.float8_e4m3fn).float() / factor)
        for value, factor in zip((inputs, layer.weight.detach()), scale, strict=True)
    ]
    assert not torch.equal(fp8, plain)
    assert torch.allclose(fp8, rounded[0] @ rounded[1].T, rtol=1e-2, atol=1e-3)


def test_autocast_on_the_cpu_is_respected() -> None:
    layer = nn.Linear(32, 32)
    mpguard.convert(layer, FP8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(16, 32)).dtype is torch.bfloat16
    assert layer(torch.randn(16, 32)).dtype is torch.float32


def test_resuming_continues_bit_for_bit() -> None:
    net = model()
    mpguard.convert(net, FP8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, 3)
    saved = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    straight = train(net, optimizer, 3)
    saved.seek(0)
    loaded = torch.load(saved)
    again = Model()
    again.load_state_dict(loaded["model"])
    mpguard.convert(again, FP8)
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
    resumed.load_state_dict(loaded["optimizer"])
    assert train(again, resumed, 3) == straight


# -- what stays the same ---------------------------------------------------------------------------


def snapshot(net: nn.Module) -> dict[str, Any]:
    return {
        "modules": {name: id(module) for name, module in net.named_modules()},
        "parameters": {name: id(each) for name, each in net.named_parameters(remove_duplicate=False)},
        "state": {name: (value.shape, value.dtype, value.device) for name, value in net.state_dict().items()},
        "requires": {name: each.requires_grad for name, each in net.named_parameters()},
        "training": {name: module.training for name, module in net.named_modules()},
    }


def test_names_parameters_hooks_and_flags_stay() -> None:
    net = model()
    called = []
    net.layers[1].up.register_forward_hook(lambda *_: called.append("forward"))
    net.layers[1].up.register_forward_pre_hook(lambda *_: called.append("before"))
    net.layers[1].up.register_full_backward_hook(lambda *_: called.append("backward"))
    net.layers[0].up.weight.requires_grad_(False)
    net.layers[2].eval()
    net.projection.note = "the user's own"  # type: ignore[assignment]
    net.projection.double()
    before, watched = snapshot(net), weakref.ref(net.layers[1].up)
    mpguard.convert(net, FP8)
    assert snapshot(net) == before
    assert watched() is net.layers[1].up and isinstance(net.layers[1].up, nn.Linear)
    assert net.projection.note == "the user's own"
    net.projection.float()
    net(torch.randint(0, 64, (2, 8))).sum().backward()
    assert called == ["before", "forward", "backward"]
    assert net.layers[0].up.weight.grad is None and net.layers[0].up.bias.grad is not None


def test_revert_gives_back_plain_layers() -> None:
    net = model()
    before, attributes = snapshot(net), {name: set(vars(module)) for name, module in net.named_modules()}
    mpguard.convert(net, FP8)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 1)
    assert mpguard.revert(net) is net
    assert {type(module) for module in net.modules()} == {type(module) for module in Model().modules()}
    assert {name: set(vars(module)) for name, module in net.named_modules()} == attributes
    assert snapshot(net) == before
    assert mpguard.revert(net) is net
    assert len(mpguard.convert(net, FP8).converted) == 7


def test_revert_removes_what_the_library_keeps_when_it_runs_and_nothing_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Transformer Engine does at the first call."""
    library: Any = TorchaoFloat8Linear.__mro__[2]
    forward = library.forward

    def keeping(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["kept"] = True
        y: torch.Tensor = forward(self, x)
        return y

    monkeypatch.setattr(library, "forward", keeping)
    layer = nn.Linear(32, 32)
    mpguard.convert(layer, FP8)
    layer(torch.randn(16, 32))
    layer.mine = 1
    assert "kept" in vars(layer)
    mpguard.revert(layer)
    assert set(vars(layer)) - set(vars(nn.Linear(1, 1))) == {"mine"}


def test_state_dicts_load_into_the_plain_model_and_back() -> None:
    converted, plain = model(), Model()
    mpguard.convert(converted, FP8)
    train(converted, torch.optim.SGD(converted.parameters(), lr=0.1), 1)
    assert list(converted.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(converted.state_dict(), strict=True)
    assert torch.equal(plain.projection.weight, converted.projection.weight)
    converted.load_state_dict(Model().state_dict(), strict=True)


def test_weights_are_saved_without_mpguard(tmp_path: Any) -> None:
    """S17: with accelerate's default, safetensors cannot save them."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = model()
    mpguard.convert(net, FP8)
    safetensors.save_model(net, tmp_path / "model.safetensors")
    plain = Model()
    safetensors.load_model(plain, tmp_path / "model.safetensors")
    assert torch.equal(plain.projection.weight, net.projection.weight)


def test_a_whole_model_is_copied_and_pickled() -> None:
    net = model()
    mpguard.convert(net, FP8)
    tokens = torch.randint(0, 64, (2, 8))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(net), loaded):
        assert torch.equal(other(tokens), net(tokens)) and type(other.projection) is TorchaoFloat8Linear
        assert other.output.weight is other.embedding.weight


def test_tied_layers_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
            self.two.weight = self.one.weight
            self.again = self.one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.again(self.two(self.one(x)))
            return y

    net = Tied()
    done = mpguard.convert(net, FP8)
    assert done.converted == ("one", "two") and net.again is net.one and net.two.weight is net.one.weight
    net(torch.randn(16, 32)).sum().backward()
    assert net.one.weight.grad is not None
    assert len(list(net.parameters())) == 3


def test_a_layer_shared_under_a_name_that_is_kept_out_is_kept_out() -> None:
    net = nn.Module()
    net.body = nn.Linear(32, 32)
    net.lm_head = net.body
    net.other = nn.Linear(32, 32)
    assert mpguard.convert(net, FP8).converted == ("other",)


def test_meta_models_are_converted_and_filled_later() -> None:
    with torch.device("meta"):
        net = Model()
    assert len(mpguard.convert(net, FP8).converted) == 7
    assert {each.device.type for each in net.parameters()} == {"meta"}
    net.to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    net.output.weight = net.embedding.weight
    losses = train(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    assert losses[-1] < losses[0]


def test_empty_weights_of_accelerate() -> None:
    from accelerate import init_empty_weights

    with init_empty_weights():
        net = Model()
    net.output.weight = net.embedding.weight  # accelerate makes new parameters; models tie theirs again
    assert len(mpguard.convert(net, FP8).converted) == 7
    net.load_state_dict(model().state_dict(), assign=True)
    net.output.weight = net.embedding.weight
    assert train(net, torch.optim.AdamW(net.parameters(), lr=1e-2), 2)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("first", ["convert", "shard"])
def test_fsdp2_of_a_meta_model_that_is_filled_when_it_is_sharded(first: str) -> None:
    """No process ever has a whole weight in memory: parameter groups are made of what there is then."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded(net: Model) -> Model:
        for block in net.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    mesh = init_device_mesh("cpu", (1,))
    source = model().state_dict()
    with torch.device("meta"):
        net = Model()
    if first == "convert":
        mpguard.convert(net, FP8)
        sharded(net)
    else:
        sharded(net)
        mpguard.convert(net, FP8)
    net.to_empty(device="cpu")
    set_model_state_dict(net, dict(source), options=StateDictOptions(full_state_dict=True))  # it changes the dict
    decayed = [each for each in net.parameters() if each.ndim > 1]
    others = [each for each in net.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2)
    losses = train(net, optimizer, 8)
    found = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    assert list(found) == list(source) and losses[-1] < losses[0]
    assert not any(torch.equal(found[name], source[name]) for name in source)
    assert sum(isinstance(each, TorchaoFloat8Linear) for each in net.modules()) == 7


def test_activation_checkpoints_compute_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    block = Block()
    mpguard.convert(block, FP8)
    inputs = torch.randn(16, 32)
    gradients = []
    for checkpointed in (False, True):
        x = inputs.clone().requires_grad_()
        (checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


# -- what is left out ------------------------------------------------------------------------------


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(32, 16)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 32)})


def quantized() -> nn.Linear:
    layer = nn.Linear(32, 32)
    layer.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("layer", "name", "reason"),
    [
        (Own(32, 32), "odd", "is a Own, whose own behaviour would be lost"),
        (nn.LazyLinear(32), "odd", "has no sizes yet"),
        (nn.Linear(30, 32), "odd", "30 is not a multiple of 16"),
        (nn.Linear(30, 10), "odd", "10 and 30 are not multiples of 16"),
        (quantized(), "odd", "is quantized, its weight is int8"),
        (TopKRouter(), "odd.logits", "MoE router"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "odd", "is a ParametrizedLinear"),
        (nn.MultiheadAttention(32, 2), "odd.out_proj", "is a NonDynamicallyQuantizableLinear"),
        (Adapted(), "odd.lora_A.default", "LoRA adapter"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_odd_layer_alone_is_skipped_with_its_reason(layer: nn.Module, name: str, reason: str) -> None:
    """S14: accelerate stops at the first of them."""
    net = nn.ModuleDict({"before": nn.Linear(32, 32), "odd": layer, "after": nn.Linear(32, 32)})
    done = mpguard.convert(net, FP8)
    assert {"before", "after"} <= set(done.converted)
    assert dict(done.skipped)[name].startswith(reason)
    assert name in str(done) and reason in str(done)


def test_layers_by_name_and_kind_stay() -> None:
    found = reasons(
        nn.ModuleDict({"lm_head": nn.Linear(32, 32), "router": nn.Linear(32, 32), "conv": nn.Conv1d(4, 4, 1)})
    )
    assert found == {"lm_head": "fp8_exclude", "router": "fp8_exclude"}
    assert reasons(model())["output"] == "output head: its weight is that of embedding"
    assert reasons(model(), FP8.replace(fp8_head=True))["output"] == ""
    assert reasons(model(), FP8.replace(fp8_exclude=("layers.0.*",)))["layers.0.up"] == "fp8_exclude"


@pytest.mark.parametrize("pattern", ["*typo*", "layers.0"])
def test_a_pattern_that_keeps_no_layer_out_is_an_error(pattern: str) -> None:
    net = model()
    with pytest.raises(mpguard.PolicyError, match="matches no Linear layer") as raised:
        mpguard.convert(net, FP8.replace(fp8_exclude=(pattern,)))
    assert type(net.projection) is nn.Linear
    if pattern == "layers.0":
        assert "it matches layers.0, a Block; write `layers.0.*`" in str(raised.value)


@pytest.mark.parametrize(("start", "end"), [(1, 1), (2, 0), (0, 2), (1, 3)])
def test_blocks_at_the_ends_stay_in_bf16(start: int, end: int) -> None:
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(
        fp8_emulate=True, fp8_param_gather=False,
        num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end,
    )  # fmt: skip
    done = mpguard.convert(net := model(blocks=6), policy)
    kept = {*range(start), *range(6 - end, 6)}
    for number, block in enumerate(net.layers):
        expected = nn.Linear if number in kept else TorchaoFloat8Linear
        assert {type(block.up), type(block.down)} == {expected}
    assert dict(done.skipped)["layers.0.up" if start else "layers.5.up"] == "first_last_layers_bf16"
    assert type(net.projection) is TorchaoFloat8Linear


def test_stacks_are_those_of_blocks() -> None:
    """Experts inside a block, and layers in a list, are no blocks; a Sequential of blocks is a stack."""
    experts = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    found = filters.stacks(
        list(nn.ModuleDict({"a": experts, "b": nn.ModuleList([nn.Linear(4, 4)] * 3)}).named_modules())
    )
    assert found == [list(experts)]
    sequential = nn.Sequential(Block(), Block(), Block())
    assert filters.stacks(list(sequential.named_modules())) == [list(sequential)]
    assert filters.stacks(list(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Block()).named_modules())) == []


def test_ends_in_bf16_without_blocks_are_refused() -> None:
    policy = FP8.replace(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1)
    with pytest.raises(mpguard.PolicyError, match="no ModuleList or Sequential of blocks"):
        mpguard.convert(nn.Linear(32, 32), policy)


@pytest.mark.parametrize("name", ["LlamaConfig", "T5Config", "MixtralConfig"])
def test_models_of_transformers(name: str) -> None:
    """Heads and routers stay, the ends of each stack too, everything else is FP8; and it trains."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 2}  # fmt: skip
    if name == "T5Config":
        sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 4, "num_heads": 2, "vocab_size": 64,
                 "decoder_start_token_id": 0}  # fmt: skip
    config = getattr(transformers, name)(**sizes)
    auto = transformers.AutoModelForSeq2SeqLM if name == "T5Config" else transformers.AutoModelForCausalLM
    net = auto.from_config(config)
    policy = FP8.replace(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    done = mpguard.convert(net, policy)
    skipped = dict(done.skipped)
    assert skipped["lm_head"] == "fp8_exclude" and len(done.converted) > 6
    assert not any("router" in each or ".gate." in each or "lm_head" in each for each in done.converted)
    stack = "encoder.block" if name == "T5Config" else "model.layers"
    assert all(not each.startswith((f"{stack}.0.", f"{stack}.3.")) for each in done.converted)
    assert any(each.startswith(f"{stack}.1.") for each in done.converted)
    tokens = torch.randint(0, 64, (2, 16))
    net(input_ids=tokens, labels=tokens).loss.backward()
    assert all(module.weight.grad is not None for module in net.modules() if type(module) is TorchaoFloat8Linear)


# -- what is refused -------------------------------------------------------------------------------


def test_converting_twice_is_a_reported_no_op() -> None:
    net = model()
    first, second = mpguard.convert(net, FP8), mpguard.convert(net, FP8)
    assert second.converted == () and second.already == first.converted and second.skipped == first.skipped
    assert "7 of them converted before" in str(second)
    net.more = nn.Linear(32, 32)
    assert mpguard.convert(net, FP8).converted == ("more",)


def test_converting_under_another_policy_is_refused() -> None:
    net = model()
    mpguard.convert(net, FP8)
    with pytest.raises(mpguard.PolicyError, match="FP8 already"):
        mpguard.convert(net, ROWWISE)


def test_what_somebody_else_has_converted_is_left_alone() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8_training(
        net, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: name == "0"
    )
    done = mpguard.convert(net, FP8)
    assert done.converted == ("1",) and dict(done.skipped)["0"] == "is FP8 already, a Float8Linear of torchao"
    mpguard.revert(net)
    assert type(net[0]).__name__ == "Float8Linear" and type(net[1]) is nn.Linear


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(nn.Linear(32, 32)), "is compiled. Convert before torch.compile"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(32, 32))), "is scripted"),
    ],
    ids=["compiled", "scripted"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fixed_models_are_refused(make: Any, message: str) -> None:
    with pytest.raises(mpguard.PolicyError, match=message):
        mpguard.convert(make(), FP8)


def test_a_model_compiled_in_place_is_refused() -> None:
    net = model()
    net.layers[0].compile()
    with pytest.raises(mpguard.PolicyError, match=r"layers.0 \(Block\) is compiled"):
        mpguard.convert(net, FP8)


def test_a_converted_model_is_compiled() -> None:
    net = Block()
    mpguard.convert(net, FP8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    inputs = torch.randn(20, 32)
    assert torch.allclose(compiled(inputs), net(inputs), rtol=1e-3, atol=1e-4)


def test_nothing_to_convert_is_an_error_not_a_bf16_run() -> None:
    with pytest.raises(mpguard.NotInForce, match="nothing in the model can be FP8: 0: 10 is not a multiple of 16"):
        mpguard.convert(nn.Sequential(nn.Linear(32, 10)), FP8)
    with pytest.raises(mpguard.NotInForce, match="has no Linear layer"):
        mpguard.convert(nn.ReLU(), FP8)


def test_a_policy_without_fp8_is_refused() -> None:
    with pytest.raises(mpguard.PolicyError, match="neither FP8 nor FP4"):
        mpguard.convert(model(), "bf16_mixed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_machine_that_cannot_run_it_is_refused_and_the_model_stays() -> None:
    net = model()
    with pytest.raises(mpguard.NotInForce, match=r"needs compute capability 8\.9"):
        mpguard.convert(net, Policy(bf16=True, fp8="hybrid"))
    assert type(net.projection) is nn.Linear


def test_fields_that_conversion_does_not_carry_are_warned_about() -> None:
    with pytest.warns(mpguard.NotCarried, match="fp8_wgrad=False"):
        mpguard.convert(model(), FP8.replace(fp8_wgrad=False))


@pytest.mark.parametrize("field", ["fp8_param", "fp8_param_gather"])
def test_parameters_in_fp8_are_refused_and_the_way_without_works(field: str) -> None:
    policy, net = FP8.replace(**{field: True}), model()
    with pytest.raises(mpguard.PolicyError, match=r"fp8_param=True.*Use policy\.replace\(fp8_param=False\)"):
        mpguard.convert(net, policy)
    assert type(net.projection) is nn.Linear
    assert mpguard.convert(net, policy.replace(fp8_param=False)).converted


def test_importing_mpguard_and_its_converter_imports_no_torch() -> None:
    code = "import sys, mpguard, mpguard.nn.fp8, mpguard.nn.fp8.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- padding ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(lead=st.lists(st.integers(0, 7), max_size=3), seed=st.integers(0, 100), bias=st.booleans())
def test_rows_of_any_number_give_what_a_multiple_would(lead: list[int], seed: int, bias: bool) -> None:
    """Outputs and gradients are those of a batch in which the rest of the rows is zero."""
    torch.manual_seed(seed)
    layer = nn.Linear(32, 16, bias=bias)
    mpguard.convert(layer, FP8)
    inputs = torch.randn(*lead, 32, requires_grad=True)
    output = layer(inputs)
    assert output.shape == (*lead, 16)
    (output * 2).sum().backward()
    rows = inputs.numel() // 32
    whole = torch.zeros(-(-max(rows, 1) // 16) * 16, 32)
    whole[:rows] = inputs.detach().reshape(-1, 32)
    whole.requires_grad_()
    weight = layer.weight.grad.clone()
    layer.weight.grad = None
    expected = layer(whole)
    (expected[:rows] * 2).sum().backward()
    assert torch.equal(output.reshape(-1, 16), expected[:rows])
    assert torch.equal(inputs.grad.reshape(-1, 32), whole.grad[:rows]) and torch.equal(weight, layer.weight.grad)


@pytest.mark.filterwarnings("default")
def test_padding_is_reported_once_and_too_much_of_it_with_the_multiple() -> None:
    layer = nn.Linear(32, 32)
    mpguard.convert(layer, FP8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * padding.CALLS):
            layer(torch.zeros(30, 32))
    messages = [str(each.message) for each in caught if issubclass(each.category, mpguard.MpguardWarning)]
    assert len(messages) == 2
    assert "the model: its input has 30 rows, FP8 matmuls need a multiple of 16; padded to 32" in messages[0]
    assert messages[1].startswith("6 % of the work of the FP8 layers is on padding") and "multiple of 16" in messages[1]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("sizes", "much"), [((320, 333, 350, 351), False), ((20, 21, 22, 32, 33), True)])
def test_padding_in_compiled_code_is_reported_once_too_and_adds_no_graph(sizes: tuple[int, ...], much: bool) -> None:
    """Too much of it as well: of the size that a graph is made for, since none counts while it runs."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    mpguard.convert(net, FP8)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.zeros(32, 32))
        assert not [each for each in caught if issubclass(each.category, mpguard.MpguardWarning)]
        for rows in sizes:
            assert compiled(torch.zeros(rows, 32)).shape == (rows, 32)
    messages = [str(each.message) for each in caught if issubclass(each.category, mpguard.MpguardWarning)]
    assert len(messages) == 1 + much
    assert messages[0].startswith(
        "compiled code: the input of an FP8 layer has a number of rows that varies, and may not be a multiple of 16"
    )
    assert not much or (
        "more than 5 % of the work is on padding" in messages[1] and "not a multiple of 16. Choose" in messages[1]
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "of the first size, and of any size"


def test_an_expert_is_compiled_once_for_all_numbers_of_tokens_with_the_results_of_eager_code() -> None:
    """Each branch on padding (none, some, much) was a graph of its own, for each layer, forward and backward."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    mpguard.convert(layer, FP8)
    torch._dynamo.reset()
    count = CompileCounter()
    compiled = torch.compile(layer, backend=count)
    for tokens in (181, 152, 150, 160, 16, 15, 7, 512, 40):
        inputs, same = (torch.ones(tokens, 32).mul(0.1).requires_grad_() for _ in range(2))
        found, expected = compiled(inputs), layer(same)
        (found.sum() + 2 * expected.sum()).backward()
        assert torch.equal(found, expected) and torch.allclose(2 * inputs.grad, same.grad), tokens
    assert count.frame_count == 2, "for the first number, and for any"


def test_batches_of_any_size_get_no_padding_where_no_size_needs_any() -> None:
    """The number of tokens of a sentence is a multiple of 16, and the number of sentences varies."""
    layer = nn.Linear(32, 16)
    mpguard.convert(layer, FP8)
    torch._dynamo.reset()
    graphs = EagerAndRecordGraphs()
    compiled = torch.compile(layer, backend=graphs)
    for sentences in (2, 3, 5):
        assert compiled(torch.zeros(sentences, 48, 32)).shape == (sentences, 48, 16)
    assert len(graphs.graphs) == 2 and not any("functional.pad" in graph.code for graph in graphs.graphs)


def test_equal_layers_with_padding_share_one_graph() -> None:
    """A name of each layer in its graph made one graph per layer, until the recompile limit turned compilation off."""
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)))
    mpguard.convert(net, FP8)
    torch._dynamo.reset()
    count = CompileCounter()
    for layer in net:
        layer.compile(backend=count)
    net(torch.zeros(33, 32))
    assert count.frame_count == 2, "the first input needs no gradient"


def test_padding_is_counted_for_a_copied_model_by_itself() -> None:
    net = nn.Sequential(nn.Linear(32, 32))
    mpguard.convert(net, FP8)
    other = copy.deepcopy(net)
    other(torch.zeros(32, 32))
    ours, theirs = net[0]._mpguard_fp8.padding, other[0]._mpguard_fp8.padding
    assert (ours.calls, theirs.calls) == (0, 1) and ours.number != theirs.number


def test_a_last_batch_alone_is_not_too_much() -> None:
    layer = nn.Linear(32, 32)
    mpguard.convert(layer, FP8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*% of the work")
        for step in range(1, 3 * padding.CALLS):
            layer(torch.zeros(31 if step % 50 == 0 else 32, 32))
