"""Recipes work as they come: which recipe runs under which strategy, with which optimizer, on which hardware."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import fake_te_weights
import torch
from processes import in_fork, mp_yaml, proof, run_python, transcript
from torch import nn

import mpguard
from mpguard.cli import main
from mpguard.nn.fp8 import convert as conversion
from mpguard.nn.fp8 import first_batch
from mpguard.nn.fp8.weights import exact_of
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import auto_on
from mpguard.runtime import guard as guards
from mpguard.runtime.guard import Guard
from mpguard.runtime.launch import launcher
from mpguard.runtime.patches import fp8_conversion
from mpguard.runtime.patches.te_optimizer_masters import _adam_init
from mpguard.runtime.patches.torch_compiled_recording import _optimized_module
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import models
from mpguard.targets.capabilities import SLOWER_ALL_GATHER, require_supported, slower_demand
from mpguard.targets.plugin import STRATEGIES

CPU = hardware.Hardware(libraries={"accelerate": "1", "deepspeed": "1", "torchao": "0.18.0"})
MACHINES = {"cpu": CPU, **{name: hardware.named(name) for name in ("p100", "v100", "a100", "h100", "b200")}}

#: The recipes of Megatron Bridge, and the machines that they are made for.
MADE_FOR = {
    "bf16_mixed": "cpu a100 h100 b200",
    "fp16_mixed": "cpu p100 v100 a100 h100 b200",
    "bf16_with_fp8_delayed_scaling_mixed": "h100 b200",
    "fp16_with_fp8_delayed_scaling_mixed": "h100 b200",
    "bf16_with_fp8_current_scaling_mixed": "h100 b200",
    "fp16_with_fp8_current_scaling_mixed": "h100 b200",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "h100 b200",
    "nanov2_bf16_with_fp8_current_scaling_mixed": "h100 b200",
    "bf16_with_fp8_subchannel_scaling_mixed": "h100 b200",
    "fp16_with_fp8_subchannel_scaling_mixed": "h100 b200",
    "bf16_with_mxfp8_mixed": "b200",
    "fp16_with_mxfp8_mixed": "b200",
    "bf16_with_nvfp4_mixed": "b200",
    "nemotron_3_super_bf16_with_nvfp4_mixed": "b200",
}
OTHERS = {
    "fp32": "cpu p100 v100 a100 h100 b200",
    "tf32": "a100 h100 b200",
    "bf16_full": "cpu a100 h100 b200",
    "bf16_with_fp8_rowwise_mixed": "h100 b200",
    "bf16_with_fp8_rowwise_with_gw_hp_mixed": "h100 b200",
    "hopper_bf16_with_fp8_mixed": "h100 b200",
    "blackwell_bf16_with_mxfp8_mixed": "b200",
    "auto": "cpu p100 v100 a100 h100 b200",
}
RUNS_ON = MADE_FOR | OTHERS


def on(monkeypatch: pytest.MonkeyPatch, machine: hardware.Hardware) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: machine)


def test_every_recipe_has_its_row() -> None:
    own = [name for name, made in mpguard.recipes().items() if made.__module__.startswith("mpguard.")]
    assert list(RUNS_ON) == own


class EightBit(torch.optim.Optimizer):
    """As those of bitsandbytes: no fused step, states in 8 bits."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            self.state[param]["state1"] = torch.zeros_like(param, dtype=torch.uint8)
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


class Fused(fake_te_weights.Adam):
    """Transformer Engine's FusedAdam, under the patch of its `__init__`."""


Fused.__init__ = _adam_init(fake_te_weights.Adam.__init__)  # type: ignore[method-assign]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "FusedAdam with masters": functools.partial(Fused, master_weights=True),
    "FusedAdam without masters": Fused,
    "8 bit": EightBit,
}


class Net(nn.Module):
    """Seventeen blocks, more than any recipe keeps out of FP8 at the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(17))
        self.lm_head = nn.Linear(32, 32)


Use = Callable[[Guard, nn.Module], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes a guard the one of this process, and a model the only one, since a search in all objects takes long.

    Layers are those of the stand-in, whatever the library.
    """
    monkeypatch.setattr(conversion, "_library", fake_te_weights.te)

    def use(guard: Guard, model: nn.Module) -> None:
        monkeypatch.setattr(guards, "_current", guard)
        monkeypatch.setattr(
            models, "objects_of", lambda kind: [own for own in model.modules() if isinstance(own, kind)]
        )

    return use


def outcome(policy: Policy, strategy: str, make: Callable[..., Any], use: Use) -> str:
    """Create an optimizer under a guard. Return the refusal, what is left out, or "" if the policy is whole."""
    guard, net = Guard(Plan(policy, strategy=strategy)), Net()
    use(guard, net)
    try:
        require_supported("accelerate", policy, strategy)
        optimizer = make(net.parameters())
        fp8_conversion.convert(guard, optimizer)  # its patch of torch's Optimizer is not applied here
    except mpguard.MpguardError as error:
        return f"refused: {error}"
    kept = any(exact_of(each) is not None for each in net.parameters())
    left = guard.left_out | guard.left_out_for.get(optimizer, {})
    assert kept is (bool(policy.fp8_param) and "fp8_param" not in left)
    return "; ".join(f"{field} off: {reason}" for field, reason in left.items())


def expected(policy: Policy, strategy: str, optimizer: str) -> str:
    """Return what the table says: the reason why parameters are not kept in FP8, if the recipe would like it."""
    if policy.fp8 and not policy.fp8_required:
        return "fp8 off: no layer can be FP8: first_last_layers_bf16; too narrow to be faster in FP8"
    if not policy.fp8_param:
        return ""
    if strategy not in ("single", "ddp") or policy.fp8_recipe == "mxfp8":
        return f"fp8_param off: not supported under {strategy} with fp8_recipe {policy.fp8_recipe}"
    return {
        "FusedAdam with masters": "",
        "FusedAdam without masters": "fp8_param off: Fused was created without FP32 master weights",
        "8 bit": "fp8_param off: EightBit has no FP32 master weights",
    }.get(optimizer, "fp8_param off: AdamW has no FP32 master weights")


@pytest.mark.parametrize("machine", MACHINES)
def test_no_recipe_refuses_an_ordinary_optimizer_on_the_hardware_that_it_is_made_for(
    machine: str, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    """Each recipe with each strategy and each kind of optimizer."""
    on(monkeypatch, MACHINES[machine])
    for name, machines in RUNS_ON.items():
        policy, runs = mpguard.recipe(name), machine in machines.split()
        assert (hardware.detect().refuses(policy) is None) is runs, (name, hardware.detect().refuses(policy))
        for strategy in STRATEGIES if runs else ():
            for optimizer, make in OPTIMIZERS.items():
                found, wanted = outcome(policy, strategy, make, use), expected(policy, strategy, optimizer)
                assert found.startswith(wanted) and bool(found) is bool(wanted), (name, strategy, optimizer, found)


@pytest.mark.parametrize("machine", ["cpu", "v100", "h100", "b200"])
def test_init_and_launch_accept_each_recipe_under_each_strategy(
    machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `init` writes is launched as it is, and both say what the run goes without."""
    from accelerate.commands.launch import launch_command_parser

    on(monkeypatch, MACHINES[machine])
    monkeypatch.setattr(launcher, "has_accelerator", lambda: machine != "cpu")
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name, machines in RUNS_ON.items():
        for strategy in STRATEGIES if machine in machines.split() else ():
            if machine == "cpu" and strategy not in ("single", "ddp"):
                continue
            words = ["init", name, "--strategy", strategy, "--num-processes", "1" if strategy == "single" else "2"]
            assert main([*words, "--force"]) == 0, capsys.readouterr().err
            printed = capsys.readouterr().out
            prepared = launcher.prepare(["--config", "mp.yaml", "train.py"], launch_command_parser)
            assert prepared is not None and prepared.plan.strategy == strategy
            assert prepared.plan.policy == mpguard.recipe(name)
            for field, reason in prepared.plan.left_out_at_start().items():
                assert f"{field} of the recipe is off: {reason}" in printed
                assert f"  {field} " in prepared.header and reason in prepared.header
            assert "will refuse it" not in printed


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", ["tf32", "fp16_mixed", "auto"])
def test_recipes_init_and_launch_have_one_answer(
    recipe: str, machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.launch import launch_command_parser

    on(monkeypatch, MACHINES[machine])
    monkeypatch.setattr(launcher, "has_accelerator", lambda: machine != "cpu")
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    runs = machine in RUNS_ON[recipe].split()
    assert main(["recipes", recipe]) == 0
    assert f"Runs here: {'yes' if runs else 'no'}" in capsys.readouterr().out
    device = ["--device", "cpu"] if machine == "cpu" else []  # `gpu` would write for GPUs of another machine
    assert main(["init", recipe, *device, "--strategy", "single"]) == (0 if runs else 2)
    assert runs or "capability 8.0" in capsys.readouterr().err
    config = mp_yaml(tmp_path, recipe=recipe, mixed_precision=None, use_cpu=str(machine == "cpu").lower())
    words = ["--config", str(config), "train.py"]
    if runs:
        assert launcher.prepare(words, launch_command_parser)
        return
    with pytest.raises(mpguard.NotInForce, match=f"the policy `{recipe}` does not run here: needs compute capability"):
        launcher.prepare(words, launch_command_parser)


# -- a demand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "demand",
    [
        lambda policy: policy.replace(fp8_param=True),
        lambda policy: policy.replace(fp8_param_gather=True),
        lambda policy: dataclasses.replace(policy, fp8_param=True),
    ],
)
@pytest.mark.parametrize("optimizer", ["AdamW", "8 bit", "FusedAdam without masters"])
def test_what_an_override_demands_is_refused(
    demand: Callable[[Policy], Policy],
    optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
    use: Use,
) -> None:
    on(monkeypatch, MACHINES["h100"])
    policy = demand(mpguard.recipe("bf16_with_fp8_current_scaling_mixed"))
    found = outcome(policy, "single", OPTIMIZERS[optimizer], use)
    assert found.startswith("refused: fp8_param: ") and "mpguard_overrides: {fp8_param: null}" in found
    assert "has fp8_param=True, which a run of accelerate" in outcome(policy, "fsdp2", OPTIMIZERS[optimizer], use)
    assert outcome(policy, "single", OPTIMIZERS["FusedAdam with masters"], use) == ""


def test_a_recipe_of_another_package_wishes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpguard.policy.recipes, "_RECIPES", dict(mpguard.policy.recipes._RECIPES))

    @mpguard.register
    def theirs() -> Policy:
        return Policy(bf16=True, fp8="hybrid", fp8_param=True)

    assert (mpguard.recipe("theirs").fp8_param, mpguard.recipe("theirs").wishes) == ("auto", ("fp8_param",))


# -- what changes later ------------------------------------------------------------------------------------------------


def test_weights_become_plain_where_a_later_optimizer_or_engine_cannot_keep_them(
    monkeypatch: pytest.MonkeyPatch, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, MACHINES["h100"])
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed")
    for later in ("AdamW", "DeepSpeed"):
        guard, net = Guard(Plan(policy)), Net()
        use(guard, net)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        fp8_conversion.convert(guard, OPTIMIZERS["FusedAdam with masters"](net.parameters()))
        assert sum(exact_of(each) is not None for each in net.parameters()) == 15
        if later == "AdamW":
            fp8_conversion.convert(guard, torch.optim.AdamW(net.parameters()))
        else:
            assert not fp8_conversion.keeps_fp8_weights(guard, "DeepSpeed", models=[net])
        assert not any(exact_of(each) is not None for each in net.parameters())
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        assert "mpguard: fp8_param is off here: " in capsys.readouterr().err
        fp8_conversion.convert(guard, torch.optim.AdamW(net.parameters()))  # the layers stay those of the same policy


def test_a_wish_is_off_without_the_library_or_under_ddp_that_came_first(
    monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed")
    on(monkeypatch, hardware.Hardware("NVIDIA H100", (9, 0), 1, (13, 0), {"torchao": "0.18.0"}))
    kind = OPTIMIZERS["FusedAdam with masters"]
    assert outcome(policy, "single", kind, use) == "fp8_param off: Transformer Engine is not installed here"
    on(monkeypatch, MACHINES["h100"])

    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()

    guard, net = Guard(Plan(policy, strategy="ddp")), DistributedDataParallel()
    use(guard, net)
    optimizer = kind(net.parameters())
    assert not fp8_conversion.keeps_fp8_weights(guard, "ddp", optimizer, [net])
    assert guard.left_out_for[optimizer] == {"fp8_param": "DDP was created before the optimizer"}


@pytest.mark.parametrize("processes", [1, 2, 7, 8, None])
def test_float8_all_gather_is_taken_from_as_many_gpus_on_as_it_pays_with(processes: int | None) -> None:
    wish = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(first_last_layers_bf16=False)
    demand = wish.replace(fp8_param=True)
    few = processes is not None and processes < 8
    left_out = Plan(wish, strategy="fsdp2", processes=processes).left_out_at_start()
    assert left_out == ({"fp8_param": SLOWER_ALL_GATHER} if few else {})
    assert not Plan(demand, strategy="fsdp2", processes=processes).left_out_at_start()
    assert slower_demand(demand, "fsdp2", processes) == (SLOWER_ALL_GATHER if few else None)
    assert slower_demand(wish, "fsdp2", processes) is None


def test_init_launch_and_explain_have_one_answer_about_float8_all_gather(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.launch import launch_command_parser

    on(monkeypatch, MACHINES["h100"])
    monkeypatch.setattr(launcher, "has_accelerator", lambda: True)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    recipe, config = "bf16_with_fp8_current_scaling_mixed", Path("mp.yaml")
    assert main(["init", recipe, "--strategy", "fsdp2", "--num-processes", "2"]) == 0
    written = config.read_text()
    assert "enable_fsdp_float8_all_gather: false" in written
    for override, said in (
        ("", "fp8_param is off: float8"),
        (", fp8_param: true", "fp8_param: true costs time: float8"),
    ):
        text = "\n".join(line for line in written.splitlines() if "mpguard_overrides" not in line)
        config.write_text(f"{text}\n  mpguard_overrides: {{first_last_layers_bf16: false{override}}}\n")
        prepared = launcher.prepare(["--config", "mp.yaml", "train.py"], launch_command_parser)
        assert prepared is not None and SLOWER_ALL_GATHER in " ".join(prepared.header.split())
        capsys.readouterr()
        assert main(["explain", "mp.yaml", "train.py"]) == 0
        printed = capsys.readouterr().out
        assert said in printed and ("mixed_precision = fp8" in printed) is bool(override)


# -- auto --------------------------------------------------------------------------------------------------------------


class SimpleBlocks(nn.Module):
    """Layers that are faster in FP8 if they are wide; the number of token ids says how many rows they would have."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(16, self.up.in_features) + input_ids.flatten()[:16, None]
        return self.down(self.up(rows))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(3))


@pytest.mark.parametrize(
    ("model", "left_out"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10)), "fp8"),
        (lambda: nn.Conv2d(3, 8, 3), "fp8"),
        (SimpleBlocks, "first_last_layers_bf16"),
        (lambda: Stack(2048), ""),
        (lambda: Stack(1536), "fp8"),  # not faster with the tokens that are usual
        (Net, "fp8"),
    ],
)
def test_auto_refuses_no_model(
    model: Callable[[], nn.Module], left_out: str, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    policy = auto_on(MACHINES["h100"])
    on(monkeypatch, MACHINES["h100"])
    guard, net = Guard(Plan(policy)), model()
    use(guard, net)
    optimizer = torch.optim.AdamW(net.parameters())
    fp8_conversion.convert(guard, optimizer)
    assert list(guard.left_out_for.get(optimizer, {})) == ([left_out] if left_out else [])
    converted = any(conversion.MARK in vars(module) for module in net.modules())
    assert converted is (left_out != "fp8")


def test_auto_goes_on_in_the_compute_dtype_where_its_library_does_not_import(
    monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    def broken(_policy: Policy, _recipe: str) -> Any:
        raise mpguard.NotInForce("convert: torchao is installed and cannot be imported")

    monkeypatch.setattr(conversion, "_library", broken)
    on(monkeypatch, MACHINES["h100"])
    guard, net = Guard(Plan(auto_on(MACHINES["h100"]))), Stack(2048)
    optimizer = torch.optim.AdamW(net.parameters())
    fp8_conversion.convert(guard, optimizer)
    assert guard.left_out_for[optimizer] == {"fp8": "torchao is installed and cannot be imported"}
    with pytest.raises(mpguard.NotInForce):
        demanding = mpguard.recipe("hopper_bf16_with_fp8_mixed")
        fp8_conversion.convert(Guard(Plan(demanding)), torch.optim.AdamW(net.parameters()))


def _called(net: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return net(input_ids)  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", ["eager", "torch.compile", "Module.compile", "compiled around", "evaluated first"])
def test_the_first_training_batch_decides(
    call: str, monkeypatch: pytest.MonkeyPatch, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, MACHINES["h100"])
    for tokens in (512, 8192):
        guard, net = Guard(Plan(auto_on(MACHINES["h100"]))), SimpleBlocks()
        use(guard, net)
        optimizer = torch.optim.AdamW(net.parameters())
        fp8_conversion.convert(guard, optimizer)
        assert all(conversion.MARK in vars(each) for each in (net.up, net.down))
        ids = torch.ones(4, tokens // 4, dtype=torch.int64)
        run: Any = net
        if call == "torch.compile":
            run = torch.compile(net, backend="eager", fullgraph=tokens < 4096)
            run = _optimized_module(type(run).__call__).__get__(run)  # its patch is not applied here
        elif call == "Module.compile":
            net.compile(backend="eager")
            net._compiled_call_impl = first_batch.telling(net, net._compiled_call_impl)
        elif call == "compiled around":
            run = torch.compile(functools.partial(_called, net), backend="eager")
        elif call == "evaluated first":
            net.eval()(ids)
            net.train()
        run(input_ids=ids).sum().backward()
        decided = call != "compiled around"
        stays = tokens > 4096 or not decided
        assert all((conversion.MARK in vars(each)) is stays for each in (net.up, net.down))
        assert ("fp8" in guard.left_out_for[optimizer]) is not stays
        assert bool(net._forward_pre_hooks) is not decided, "the hook is gone"
    printed = capsys.readouterr().err
    assert "2 of 2 Linear layers in FP8 (te tensorwise); layers of width 2048 are 1.04 times as fast in FP8" in printed
    late = "fp8 is off here: layers of width 2048 are 0.70 times as fast in FP8 as in BF16 at 512 tokens (fp8_table)"
    assert (late in printed) is (call != "compiled around")


def test_a_recipe_that_is_named_is_kept_and_its_speed_said(
    monkeypatch: pytest.MonkeyPatch, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, MACHINES["h100"])
    policy = mpguard.recipe("hopper_bf16_with_fp8_mixed").replace(fp8_param=False)
    for tokens, said in ((512, True), (16384, False)):
        guard, net = Guard(Plan(policy)), SimpleBlocks()
        use(guard, net)
        fp8_conversion.convert(guard, torch.optim.AdamW(net.parameters()))
        net(torch.ones(1, tokens, dtype=torch.int64))
        assert all(conversion.MARK in vars(each) for each in (net.up, net.down))
        printed = capsys.readouterr().err
        assert ("mpguard: BF16 would be faster here: layers of width 2048 are 0.63 times as fast" in printed) is said


def test_a_wish_for_fp8_is_none_where_the_hardware_has_none(monkeypatch: pytest.MonkeyPatch, use: Use) -> None:
    policy = mpguard.recipe("bf16_mixed").replace(fp8="auto")
    for machine, why in (("a100", "measured on Hopper only"), ("b200", "measured on Hopper only"), ("cpu", "Hopper")):
        on(monkeypatch, MACHINES[machine])
        assert MACHINES[machine].refuses(policy) is None
        guard, net = Guard(Plan(policy)), Stack(2048)
        use(guard, net)
        optimizer = torch.optim.AdamW(net.parameters())
        fp8_conversion.convert(guard, optimizer)
        assert why in guard.left_out_for[optimizer]["fp8"]


# -- the proof ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.path.insert(0, {support!r})
import fake_te_weights, torch
from torch import nn
from mpguard.policy import hardware
hardware.detect = lambda: hardware.named("h100")
import mpguard
fake_te_weights.install()
policy = mpguard.recipe({recipe!r}).replace(fp8_required=False)  # its layers multiply in BF16
mpguard.activate(policy, proof_json={proof!r})
blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(5))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = {model}
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x
net = Net()
optimizer = {optimizer}
from mpguard.runtime import guard
guard.current().recorder.listen_to_modules()  # as with Transformer Engine
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(16, 32)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ADAMW, FUSED = "torch.optim.AdamW(net.parameters())", "fake_te_weights.Adam(net.parameters(), master_weights=True)"


@pytest.mark.parametrize(
    ("recipe", "model", "optimizer", "row", "found"),
    [
        (
            "nanov2_bf16_with_fp8_current_scaling_mixed",
            "blocks",
            ADAMW,
            "fp8_param",
            "off: AdamW has no FP32 master weights",
        ),
        ("auto", "[nn.Linear(32, 10)]", ADAMW, "fp8", "off: no layer can be FP8"),
    ],
)
def test_the_proof_says_what_the_run_goes_without(
    recipe: str, model: str, optimizer: str, row: str, found: str, tmp_path: Path
) -> None:
    model = model if model == "blocks" else f"nn.ModuleList({model})"
    support = str(Path(fake_te_weights.__file__).parent)
    (tmp_path / "train.py").write_text(
        PROGRAM.format(
            support=support, recipe=recipe, model=model, optimizer=optimizer, proof=str(tmp_path / "proof.json")
        )
    )
    run = in_fork([tmp_path / "train.py"], cwd=tmp_path, MPGUARD_POLICY=str(Policy(bf16=True)))
    assert run.returncode == 0, transcript(run)
    facts = proof(tmp_path / "proof.json")
    assert facts["verdict"] == "in force" and facts["rows"][row]["found"].startswith(found)
    assert facts["rows"][row]["ok"] is None and facts["observed"]["left_out"][row]
    assert f"mpguard: {row} is off here: " in run.stderr


LORA = """
import torch, mpguard
from torch import nn
from mpguard.runtime import guard as guards
mpguard.activate(mpguard.recipe("hopper_bf16_with_fp8_mixed").replace(fp8_emulate=True, compile=False))
class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.lora_A, self.lora_B = nn.Linear(32, 48), nn.Linear(32, 16), nn.Linear(16, 48)
        self.base.requires_grad_(False)
    def forward(self, x): return self.base(x) + self.lora_B(self.lora_A(x))
m = nn.Sequential(Lora(), nn.Linear(48, 64))
o = torch.optim.AdamW([each for each in m.parameters() if each.requires_grad])
print(sorted(guards.current().recorder.account.weights), flush=True)
"""


def test_products_by_a_frozen_base_in_fp8_are_recognized(tmp_path: Path) -> None:
    """Transformer Engine's kernels are recognized by the shapes of weights; an adapter's optimizer has no others."""
    pytest.importorskip("torchao", reason="its layers are emulated")
    (tmp_path / "t.py").write_text(LORA)
    ended = in_fork([tmp_path / "t.py"], cwd=tmp_path, program=run_python)
    assert "(48, 32)" in ended.stdout, transcript(ended)
