"""What people hand to `convert` that is no plain model: a clear error or a reported skip, and the model untouched."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
import torch.distributed as dist
from paths import PROGRAMS, TESTS
from processes import command, in_fork, mp_yaml, results, transcript
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mpguard
from mpguard.nn.fp8 import convert as conversion
from mpguard.policy import hardware
from mpguard.policy.policy import Policy

FP8 = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*(padded to|on padding).*:mpguard.MpguardWarning")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)))


def look(net: nn.Module) -> Any:
    """Everything that a refusal must leave: objects, classes, attributes, values."""
    return [
        (
            name,
            id(module),
            type(module),
            set(vars(module)),
            [(key, id(each)) for key, each in module.named_parameters()],
        )
        for name, module in net.named_modules()
    ]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> hardware.Hardware:
    found = hardware.named("h100")
    monkeypatch.setattr(hardware, "detect", lambda: found)
    return found


# -- a library that is not as it should be -----------------------------------------------------------


@pytest.fixture
def te_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformer Engine as it is when it was built for another CUDA."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("raise OSError('libcublas.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("transformer_engine") or name.endswith("version.te")]:
        del sys.modules[name]


@pytest.mark.usefixtures("te_broken", "hopper")
def test_transformer_engine_that_cannot_be_imported() -> None:
    net = model()
    before = look(net)
    with pytest.raises(mpguard.NotInForce) as raised:
        mpguard.convert(net, Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", backend="te"))
    assert "transformer_engine is installed and cannot be imported (OSError: libcublas.so.13" in str(raised.value)
    assert "another backend than te" in str(raised.value) and look(net) == before


@pytest.mark.usefixtures("te_broken", "hopper")
def test_the_other_backend_goes_on_without_it() -> None:
    assert mpguard.convert(model(), Policy(bf16=True, fp8="hybrid", backend="torchao")).backend == "torchao"


@pytest.mark.parametrize("error", [AttributeError("module has no attribute 'config'"), TypeError("unexpected keyword")])
def test_a_library_of_another_version_that_has_other_names(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from mpguard.nn.fp8 import torchao

    calls = []

    def template(_layer: nn.Linear) -> nn.Module:
        calls.append(1)
        if len(calls) == 2:  # the first layer went well: it must not have been changed already
            raise error
        return nn.Linear(1, 1)

    monkeypatch.setattr(torchao, "templates", lambda _policy: template)
    net = model()
    before = look(net)
    with pytest.raises(mpguard.NotInForce, match=r"torchao .* has another interface than expected .*Install 0\.18"):
        mpguard.convert(net, FP8)
    assert look(net) == before


def test_a_library_without_what_is_imported_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpguard.nn.fp8.torchao", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.float8", ModuleType("torchao.float8"))
    net = model()
    before = look(net)
    with pytest.raises(mpguard.NotInForce, match=r"torchao .*cannot import name 'Float8LinearConfig'"):
        mpguard.convert(net, FP8)
    assert look(net) == before


# -- a wrong device ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hopper")
def test_a_batch_on_the_cpu() -> None:
    """Without emulation torch would multiply FP8 on the CPU, slowly and without a word."""
    net = model()
    mpguard.convert(net, FP8.replace(fp8_emulate=False))
    with pytest.raises(mpguard.NotInForce, match=r"0: its input is on the CPU.*fp8_emulate=True"):
        net(torch.randn(16, 32))


# -- converted by another library -----------------------------------------------------------------------


def test_layers_that_accelerate_converted_are_not_changed() -> None:
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    convert_model_to_fp8_ao(net, Float8LinearConfig(emulate=True))  # all but the first and the last
    before = look(net)
    done = mpguard.convert(net, FP8)
    assert done.converted == ("0", "3") and dict(done.skipped).keys() == {"1", "2"}
    assert dict(done.skipped)["1"] == "is FP8 already, a Float8Linear of torchao"
    mpguard.revert(net)
    assert look(net) == before


def test_a_model_that_is_fp8_already_is_reported_as_such() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = convert_to_float8_training(model(), config=Float8LinearConfig(emulate=True))
    before = look(net)
    with pytest.raises(mpguard.NotInForce, match="nothing in the model can be FP8: 0: is FP8 already"):
        mpguard.convert(net, FP8)
    assert look(net) == before


def test_lora_of_peft_trains_in_full_precision_on_an_fp8_base() -> None:
    from peft import LoraConfig, get_peft_model

    base = model()
    plain = copy.deepcopy(base)
    net = get_peft_model(base, LoraConfig(r=16, target_modules=["0", "2.0"]))
    done = mpguard.convert(net, FP8)
    kept = {name: reason for name, reason in done.skipped if "lora_" in name}
    assert len(kept) == 4 and set(kept.values()) == {"LoRA adapter"}
    assert sorted(name.removeprefix("base_model.model.") for name in done.converted) == [
        "0.base_layer", "2.0.base_layer", "2.1",
    ]  # fmt: skip
    trainable = [each for each in net.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.1)
    before = [each.clone() for each in trainable]
    for _ in range(2):
        net(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(one, other) for one, other in zip(before, trainable, strict=True))
    layer = net.base_model.model[0].base_layer
    assert layer.weight.grad is None and torch.equal(layer.weight, plain[0].weight)
    mpguard.revert(net)
    assert type(layer) is nn.Linear


def test_the_layers_of_dora_and_merged_adapters_too() -> None:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(model(), LoraConfig(r=16, target_modules=["0"], use_dora=True))
    mpguard.convert(net, FP8)
    net(torch.randn(16, 32)).sum().backward()
    merged = mpguard.revert(net).merge_and_unload()
    assert type(merged[0]) is nn.Linear and mpguard.convert(merged, FP8).converted == ("0", "2.0", "2.1")


class Params4bit(nn.Parameter):
    """As bitsandbytes has it: packed, in a parameter of its own class."""


class Linear4bit(nn.Linear):
    """As bitsandbytes has it: a Linear that multiplies by what it has packed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight = Params4bit(torch.zeros(inputs * outputs // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_layers_like_those_of_bitsandbytes() -> None:
    net = nn.Sequential(nn.Linear(32, 32), Linear4bit(32, 32), nn.Linear(32, 32))
    done = mpguard.convert(net, FP8)
    assert done.converted == ("0", "2")
    assert dict(done.skipped) == {"1": "is a Linear4bit, whose own behaviour would be lost"}
    packed = nn.Linear(32, 32)
    packed.weight = Params4bit(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)
    done = mpguard.convert(nn.Sequential(nn.Linear(32, 32), packed), FP8)
    assert dict(done.skipped) == {"1": "is quantized, its weight is uint8"}


def test_weights_that_torchao_has_quantized() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = model()
    quantize_(net[0], Int8WeightOnlyConfig())
    before = look(net[0])
    done = mpguard.convert(net, FP8)
    assert "0" not in done.converted and dict(done.skipped)["0"].startswith("is quantized, its weight is a")
    assert look(net[0]) == before


# -- wrapped models ----------------------------------------------------------------------------------------


def test_names_are_the_models_own_under_wrappers() -> None:
    """As in `fp8_exclude`, which is reported once for the plain model."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    net = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    wrapping.apply_activation_checkpointing(net, check_fn=lambda each: isinstance(each, nn.Linear))
    done = mpguard.convert(nn.DataParallel(net), FP8.replace(fp8_exclude=("1.0",)))
    assert done.converted == ("0", "1.1") and done.skipped == (("1.0", "fp8_exclude"),)
    net(torch.randn(16, 32)).sum().backward()


def test_a_layer_that_is_sharded_by_itself() -> None:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with process_group():
        fully_shard(net[0], mesh=init_device_mesh("cpu", (1,)))
        done = mpguard.convert(net, FP8)
    assert done.converted == ("1",)
    assert dict(done.skipped) == {"0": "is sharded by itself already; convert before fully_shard"}


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- fixed, frozen and odd models --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (lambda net: torch.jit.trace(net, torch.randn(16, 32)), "is scripted"),
        (torch.jit.script, "is scripted"),
        (torch.compile, "is compiled"),
        (lambda net: nn.Sequential(net, torch.compile(model())), "is compiled"),
        (lambda net: (net[2].compile(), net)[1], r"2 \(Sequential\) is compiled"),
    ],
    ids=["traced", "scripted", "compiled", "compiled inside", "compiled in place"],
)
def test_a_model_whose_code_is_fixed(fixed: Any, message: str) -> None:
    net = fixed(model())
    before = look(net)
    with pytest.raises(mpguard.PolicyError, match=message):
        mpguard.convert(net, FP8)
    assert look(net) == before


def test_a_frozen_model_is_converted_and_stays_frozen() -> None:
    """Gradients pass through it, to what comes before."""
    net = model().requires_grad_(False)
    assert len(mpguard.convert(net, FP8).converted) == 3
    assert not any(each.requires_grad for each in net.parameters())
    inputs = torch.randn(16, 32, requires_grad=True)
    net(inputs).sum().backward()
    assert inputs.grad is not None and inputs.grad.any() and all(each.grad is None for each in net.parameters())


def test_weights_outside_of_linear_layers_are_reported() -> None:
    """Experts in one parameter: "all Linear layers" is then a small share of the weights."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=8, **sizes)
    done = mpguard.convert(transformers.MixtralForCausalLM(config), FP8)
    ((kind, share),) = done.others
    assert kind == "MixtralExperts" and share > 0.8
    first = str(done).splitlines()[0]
    assert (
        first.startswith("4 of 5 Linear layers in FP8") and "MixtralExperts (88 %)" in first and "stay in bf16" in first
    )
    lazy = nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(32), nn.LazyConv2d(4, 3))
    assert mpguard.convert(lazy, FP8).others == ()


def test_a_complex_weight() -> None:
    done = mpguard.convert(nn.Sequential(nn.Linear(32, 32, dtype=torch.complex64), nn.Linear(32, 32)), FP8)
    assert dict(done.skipped) == {"0": "has a complex weight"}


def test_an_own_forward_of_an_instance_is_kept() -> None:
    """Somebody has put a function in the place of one layer's forward."""
    net = model()
    net[0].forward = lambda x: x @ net[0].weight.T  # type: ignore[method-assign]
    done = mpguard.convert(net, FP8)
    assert "0" not in done.converted and dict(done.skipped)["0"] == "has a forward of its own, set on the instance"


@pytest.mark.parametrize("value", [None, "model", [nn.Linear(32, 32)], nn.Linear])
def test_what_is_no_model(value: Any) -> None:
    with pytest.raises(mpguard.PolicyError, match=r"convert: .* is not a torch\.nn\.Module"):
        mpguard.convert(value, FP8)
    with pytest.raises(mpguard.PolicyError, match=r"revert: .* is not a torch\.nn\.Module"):
        mpguard.revert(value)


def test_what_is_no_policy() -> None:
    net = model()
    with pytest.raises(mpguard.UnknownRecipe):
        mpguard.convert(net, "fp8")
    with pytest.raises(mpguard.PolicyError, match=r"convert: .* is neither an mpguard\.Policy"):
        mpguard.convert(net, {"fp8": "hybrid"})  # type: ignore[arg-type]
    assert type(net[0]) is nn.Linear


def test_libraries_are_named_with_the_versions_that_are_tested_here() -> None:
    import importlib.metadata

    for library, version in conversion.LIBRARIES.values():
        if library != "transformer_engine":
            assert importlib.metadata.version(library).startswith(version)


# -- parameters in FP8, where nothing holds them ---------------------------------------------------------------


PARAMETERS = FP8.replace(fp8_param=True)


def test_parameters_in_fp8_are_refused_at_start_where_the_strategy_is_known(tmp_path: Path) -> None:
    overrides = "{fp8_emulate: true, fp8_param: true}"
    fp8 = f"{{mpguard_recipe: bf16_with_fp8_current_scaling_mixed, mpguard_overrides: {overrides}}}"
    config = mp_yaml(tmp_path, mixed_precision="fp8", fp8_config=fp8)
    run = in_fork(["--config", config, PROGRAMS / "accelerated.py"], cwd=tmp_path)
    assert run.returncode in (1, 2) and results(run) == [], transcript(run)
    assert "has fp8_param=True, which a run of accelerate" in run.stderr
    assert "To go without: mpguard_overrides: {fp8_param: null}" in run.stderr


@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
def test_and_when_the_optimizer_is_made_where_it_was_not(tmp_path: Path, engine: str) -> None:
    """In a custom training loop, FSDP2 or not: float8 all-gather is accelerate's. No step is taken."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, mpguard\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(TESTS / 'support')!r}]\n"
        "from test_convert_input import PARAMETERS, model\n"
        "mpguard.activate(PARAMETERS)\n"
        "net = model()\n"
        f"if {engine!r} == 'fsdp2':\n"
        "    import torch.distributed as dist\n"
        "    from torch.distributed.device_mesh import init_device_mesh\n"
        "    from torch.distributed.fsdp import fully_shard\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "    fully_shard(net, mesh=init_device_mesh('cpu', (1,)))\n"
        "torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "print('went on')\n"
    )
    run = command(Path(sys.executable).name, program, cwd=tmp_path)
    assert run.returncode == 1 and "went on" not in run.stdout, transcript(run)
    why = {"plain": "fp8_param: not supported under single", "fsdp2": "only accelerate enables float8 all-gather"}
    assert why[engine] in run.stderr, run.stderr
    assert "mpguard_overrides: {fp8_param: null}" in run.stderr
