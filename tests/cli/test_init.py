"""`mpguard init`: what it writes is accepted by the real accelerate and the real DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import accelerate_with_forks, free_port, in_fork

import mpguard
from mpguard import targets
from mpguard.cli import main
from mpguard.document import mp_yaml, read
from mpguard.policy import hardware, recipes
from mpguard.targets import capabilities
from mpguard.targets.plugin import STRATEGIES

REASON = "configs are read by accelerate itself"
load_config_from_file = pytest.importorskip(
    "accelerate.commands.config.config_args", reason=REASON
).load_config_from_file
_launch = pytest.importorskip("accelerate.commands.launch", reason=REASON)
_validate_launch_command, launch_command_parser = _launch._validate_launch_command, _launch.launch_command_parser

NO_GPU = hardware.Hardware(libraries={"accelerate": "1.15.0"})
A100S = hardware.Hardware("NVIDIA A100", (8, 0), 4, (13, 0), {"te": "2.20.2", "torchao": "0.18.0"})
V100 = hardware.Hardware("NVIDIA V100", (7, 0), 1, (13, 0), {})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    on(monkeypatch, NO_GPU)
    return tmp_path


def on(monkeypatch: pytest.MonkeyPatch, machine: hardware.Hardware) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: machine)


def init(*arguments: str) -> dict[str, Any]:
    """Run the command, and return the data of the YAML."""
    assert main(["init", *arguments]) == 0
    return read(Path("mp.yaml")).require()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "recipe", ["bf16_mixed", "fp16_mixed", "fp32", "bf16_with_fp8_delayed_scaling_mixed", "hopper_bf16_with_fp8_mixed"]
)
def test_accelerate_accepts_it_and_the_policy_is_in_it(recipe: str, strategy: str, folder: Path) -> None:
    config = init(recipe, "--strategy", strategy)
    policy = mpguard.recipe(recipe)
    assert mp_yaml.load_policy(Path("mp.yaml")) == policy
    assert targets.differences(config, policy, "accelerate", strategy) == []
    assert load_config_from_file("mp.yaml").fp8_config["mpguard_recipe"] == recipe
    arguments, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", "mp.yaml", "train.py"])
    )
    assert (arguments.use_fsdp, arguments.use_deepspeed) == (
        strategy.startswith("fsdp"),
        strategy.startswith("deepspeed"),
    )
    named = targets.lookup(config, "deepspeed_config.deepspeed_config_file")
    if named is targets.ABSENT:
        mode = "fp8" if policy.fp8 else policy.compute_dtype.short if policy.low_precision else "no"
        assert arguments.mixed_precision == mode
    else:  # set only in the JSON
        assert "mixed_precision" not in config
        assert targets.differences(json.loads(Path(named).read_text()), policy, "deepspeed", strategy) == []


@pytest.mark.parametrize("recipe", ["bf16_mixed", "fp16_mixed", "bf16_full"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_accepts_its_file(recipe: str, stage: int) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    init(recipe, "--strategy", f"deepspeed-zero{stage}", "--batch-size", "4")
    config = DeepSpeedConfig(json.loads(Path("ds_config.json").read_text()))
    assert config.zero_config.stage == stage
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)
    assert (config.bfloat16_config.enabled, config.float16_config.enabled) == (
        recipe != "fp16_mixed",
        recipe == "fp16_mixed",
    )
    if recipe == "bf16_mixed":
        assert str(config.communication_data_type) == "torch.float32"


def test_the_batch_size_of_deepspeed_is_filled_in_by_the_trainer_or_given(capsys: pytest.CaptureFixture[str]) -> None:
    """The Trainer stops at a number that is not its own, DeepSpeed alone at "auto"."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    init("bf16_mixed", "--strategy", "deepspeed-zero2")
    assert "deepspeed.initialize itself needs a number: --batch-size N" in capsys.readouterr().out
    arguments = TrainingArguments(
        "out", bf16=True, use_cpu=True, per_device_train_batch_size=6, gradient_accumulation_steps=2, report_to=[]
    )
    for words, stops in ((), False), (("--batch-size", "1"), True):
        init("bf16_mixed", "--strategy", "deepspeed-zero2", "--force", *words)
        config = HfTrainerDeepSpeedConfig("ds_config.json")
        config.trainer_config_process(arguments)
        assert bool(config.mismatches) == stops
    assert "The Trainer stops if its batch size" in capsys.readouterr().out
    assert main(["init", "bf16_mixed", "--strategy", "fsdp2", "--force", "--batch-size", "1"]) == 2
    assert "it is written for DeepSpeed only" in capsys.readouterr().err


def test_what_the_yaml_can_say_needs_no_deepspeed_file() -> None:
    config = init("fp32", "--strategy", "deepspeed-zero2")
    assert not Path("ds_config.json").exists()
    assert config["deepspeed_config"]["zero_stage"] == 2 and config["mixed_precision"] == "no"


def test_without_a_gpu_it_is_for_the_cpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = init("bf16_mixed", "--strategy", "ddp")
    assert (config["distributed_type"], config["use_cpu"], config["num_processes"]) == ("MULTI_CPU", True, 2)
    out = capsys.readouterr().out
    assert "this machine has no GPU" in out and out.endswith("Next: mpguard launch --config mp.yaml train.py\n")
    config = init("bf16_mixed", "--force")
    assert (config["distributed_type"], config["use_cpu"], config["num_processes"]) == ("NO", True, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bf16_mixed", "--device", "gpu"),
        ("tf32",),
        ("hopper_bf16_with_fp8_mixed",),
        ("bf16_mixed", "--strategy", "fsdp2"),
    ],
)
def test_what_needs_a_gpu_is_written_for_one_and_that_is_said(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(*arguments)["use_cpu"] is False
    assert "Written for GPUs. This machine has none: the recipe was not checked" in capsys.readouterr().out


def test_the_default_strategy_is_ddp_where_there_are_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, A100S)
    config = init("bf16_mixed")
    assert (config["distributed_type"], config["num_processes"], config["use_cpu"]) == ("MULTI_GPU", 4, False)


@pytest.mark.parametrize(
    ("machine", "recipe", "rehearsed"), [(A100S, "hopper_bf16_with_fp8_mixed", True), (V100, "bf16_mixed", False)]
)
def test_device_gpu_writes_for_the_gpus_of_another_machine(
    machine: hardware.Hardware,
    recipe: str,
    rehearsed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on(monkeypatch, machine)
    assert init(recipe, "--device", "gpu")["fp8_config" if rehearsed else "mixed_precision"]
    out = capsys.readouterr().out
    assert "Written for other GPUs. The recipe cannot run here" in out
    assert ("`mpguard launch --emulate` rehearses it here" in out) is rehearsed


@pytest.mark.parametrize(
    ("machine", "recipe", "message"),
    [
        (A100S, "hopper_bf16_with_fp8_mixed", "needs compute capability 8.9 or higher for FP8"),
        (V100, "bf16_mixed", "needs compute capability 8.0 or higher for BF16"),
    ],
)
def test_a_recipe_that_the_gpu_cannot_run_is_refused_with_the_reason(
    machine: hardware.Hardware,
    recipe: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on(monkeypatch, machine)
    assert main(["init", recipe]) == 2
    assert message in capsys.readouterr().err
    assert not Path("mp.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bf16_mixd"], "did you mean `bf16_mixed`"),
        (["bf16_mixed", "-o", "nowhere/mp.yaml"], "there is no folder nowhere"),
        (["bf16_mixed", "-o", "mp.json"], "init writes YAML; a name that ends in .yaml"),
        (["bf16_mixed", "-o", "."], "is a folder"),
        (["bf16_mixed", "--num-processes", "4"], "Add --strategy ddp"),
        (["bf16_mixed", "--num-processes", "0"], "0 is not a number; 1 or more is needed"),
        (["bf16_mixed", "--strategy", "fsdp2", "--device", "cpu"], "applies it on GPUs only"),
        (["tf32", "--device", "cpu"], "cannot be applied on a CPU: it needs compute capability 8.0. Use"),
        (["bf16_mixed", "--strategy", "dpp"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("there", ["mp.yaml", "ds_config.json"])
def test_a_file_that_is_there_is_kept_without_force(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["init", "bf16_mixed", "--strategy", "deepspeed-zero1"]
    Path(there).write_text("mine")
    assert main(arguments) == 2
    assert f"{there}: already exists, and was not changed" in capsys.readouterr().err
    assert Path(there).read_text() == "mine" and len(list(Path().iterdir())) == 1
    assert main([*arguments, "--force"]) == 0
    assert Path(there).read_text() != "mine"


@pytest.mark.parametrize("machine", [NO_GPU, V100, A100S])
@pytest.mark.parametrize("strategy", ["single", "fsdp2", "deepspeed-zero2"])
def test_auto_is_left_to_the_launch(
    machine: hardware.Hardware, strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file for all machines: it has no precision of its own, which would be that of this machine."""
    on(monkeypatch, machine)
    config = init("auto", "--device", "gpu", "--strategy", strategy, "--num-processes", "1")
    assert mp_yaml.stored(read(Path("mp.yaml"))).recipe == "auto" and "mixed_precision" not in config
    assert not Path("ds_config.json").exists()
    assert (
        f"each launch decides by the GPU that it finds, here {hardware.best(machine)[0]} (" in capsys.readouterr().out
    )
    parsed = launch_command_parser().parse_args(["--config_file", "mp.yaml", "train.py"])
    assert _validate_launch_command(parsed)[0].mixed_precision == "no"
    assert mp_yaml.load_policy(Path("mp.yaml")) == mpguard.recipe("auto")


def test_auto_on_the_cpu_is_fp32_whatever_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, A100S)
    assert init("auto", "--device", "cpu")["use_cpu"] is True
    assert mp_yaml.load_policy(Path("mp.yaml")) == mpguard.recipe("fp32")
    assert mpguard.recipe("auto") == mpguard.recipe("bf16_mixed")


def test_what_no_part_of_the_run_can_do_is_said_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpguard.recipes()
    monkeypatch.setattr(recipes, "_RECIPES", dict(recipes._RECIPES))

    @mpguard.register
    def demanding() -> mpguard.Policy:
        return mpguard.recipe("bf16_with_nvfp4_mixed").replace(fp8_wgrad=False, fp4=None, fp8="e4m3")

    init("demanding")
    out = capsys.readouterr().out
    assert "`mpguard launch` will refuse it" in out and "only megatron, megatron-bridge can" in out
    assert "mpguard_overrides: {fp8_wgrad: true}" in out
    text = (
        Path("mp.yaml")
        .read_text()
        .replace(
            "  mpguard_recipe: demanding\n", "  mpguard_recipe: demanding\n  mpguard_overrides: {fp8_wgrad: true}\n"
        )
    )
    Path("mp.yaml").write_text(text)
    capabilities.require_supported("accelerate", mp_yaml.load_policy(Path("mp.yaml")), "single")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1", "fsdp2", "deepspeed-zero3"])
def test_it_says_where_the_parameters_in_fp8_of_a_recipe_are_kept(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing about them is in the file: the recipe is what it is. Where they are supported, the optimizer is named."""
    init("bf16_with_fp8_current_scaling_mixed", "--strategy", strategy)
    out = capsys.readouterr().out
    policy = mp_yaml.load_policy(Path("mp.yaml"))
    capabilities.require_supported("accelerate", policy, strategy)
    held = strategy in ("single", "ddp")
    assert policy.fp8_param == "auto" and ("FusedAdam(model.parameters(), ..., master_weights=True)" in out) is held
    assert (f"fp8_param of the recipe is off: not supported under {strategy}" in out) is not held
    assert "will refuse it" not in out


def test_a_run_without_master_weights_is_told_to_load_its_model_so(capsys: pytest.CaptureFixture[str]) -> None:
    init("bf16_full")
    assert "model.to(torch.bfloat16)" in capsys.readouterr().out


def test_standard_output_is_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "bf16_mixed", "-o", "-"]) == 2
    assert "a file name is needed" in capsys.readouterr().err and not Path("-").exists()


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["init", "bf16_mixed", "--strategy", "deepspeed-zero3", "--num-processes", "8", "--format", "json"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert (facts["version"], facts["recipe"], facts["strategy"], facts["num_processes"]) == (
        1,
        "bf16_mixed",
        "deepspeed-zero3",
        8,
    )
    assert [each["path"] for each in facts["files"]] == ["mp.yaml", "ds_config.json"]
    assert facts["files"][1]["content"] == json.loads(Path("ds_config.json").read_text())


SCRIPT = """
from accelerate import Accelerator
state = Accelerator().state
plugin = state.deepspeed_plugin
print("RESULT", state.mixed_precision, state.device.type, plugin and plugin.deepspeed_config["bf16"]["enabled"])
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategy", "single"], "RESULT bf16 cpu None"),
        (["--strategy", "deepspeed-zero2", "--num-processes", "1"], "RESULT bf16 cpu True"),
    ],
)
def test_accelerate_launches_it(arguments: list[str], expected: str) -> None:
    init("bf16_mixed", *arguments)
    Path("show.py").write_text(SCRIPT)
    words = ["--config_file", "mp.yaml", "--main_process_port", free_port(), "show.py"]
    done = in_fork(words, cwd=Path.cwd(), program=accelerate_with_forks, CUDA_VISIBLE_DEVICES="")
    assert expected in done.stdout, done.stdout + done.stderr
