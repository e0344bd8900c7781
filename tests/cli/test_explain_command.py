"""`mpguard explain`: text, JSON, launch lines, proofs, and files that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import seconds

from mpguard.cli import main

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  mixed_precision: fp16
fp8_config:
  backend: TE
  amax_history_length: 16
"""
SCRIPT = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
with torch.autocast("cuda", dtype=torch.bfloat16):
    pass
"""
GUARDED = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: fp16
num_processes: 8
fsdp_config:
  fsdp_version: 2
fp8_config:
  mpguard_recipe: bf16_mixed
  mpguard_overrides: {grad_reduce_in_fp32: false}
"""
PROOF: dict[str, Any] = {
    "version": 1, "verdict": "not in force", "recipe": "bf16_mixed", "policy": {"bf16": True}, "config": None,
    "failures": ["compute: fp32; asked: bf16"],
    "rows": [{"name": "compute", "found": "fp32", "asked": "bf16", "ok": False}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("mp.yaml").write_text(CONFIG, encoding="utf-8")
    Path("guarded.yaml").write_text(GUARDED, encoding="utf-8")
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def explained(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["explain", *words, "--format", "json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def setting(found: dict[str, Any], key: str) -> dict[str, Any]:
    return next(each for each in found["settings"] if each["key"] == key)


def test_json_has_value_origin_and_what_is_shadowed(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "mp.yaml", "train.py")
    assert found.keys() == {"version", "settings", "unread"} and found["version"] == 1
    mode = setting(found, "mixed_precision")
    assert mode.keys() == {"key", "value", "source", "shadowed"}
    assert (mode["value"], mode["source"]) == ("fp16", {"layer": "code", "file": "train.py", "line": 4})
    assert [(each["value"], each["source"]["line"]) for each in mode["shadowed"]] == [("fp16", 6), ("bf16", 3)]
    assert all(each.keys() == {"value", "source", "why"} and each["why"] for each in mode["shadowed"])
    assert {"key": "fp8_config.amax_history_length", "file": "mp.yaml", "line": 9} in found["unread"]
    assert setting(found, "autocast")["source"] == {"layer": "code", "file": "train.py", "line": 5}


def test_a_policy_replaces_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "guarded.yaml", "train.py")
    reduce = setting(found, "fsdp.reduce_dtype")
    assert (reduce["value"], reduce["source"]["layer"], reduce["source"]["line"]) == ("bf16", "override", 9)
    mode = setting(found, "mixed_precision")
    assert (mode["value"], mode["source"]["layer"]) == ("bf16", "recipe")
    assert {each["source"]["layer"] for each in mode["shadowed"]} == {"code", "YAML"}
    stock = explained(capsys, "guarded.yaml", "train.py", "--stock")
    assert setting(stock, "mixed_precision")["value"] == "fp16"
    assert "fp8_config.mpguard_recipe" in {each["key"] for each in stock["unread"]}


def test_the_loss_scale_begins_where_the_run_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path("guarded.yaml")
    config.write_text("mixed_precision: fp16\nfp8_config:\n  mpguard_recipe: fp16_mixed\n")
    script = "from accelerate import Accelerator\nfrom accelerate.utils import GradScalerKwargs\n"
    for own, value, layer in (("", 65536.0, "default"), ("kwargs_handlers=[GradScalerKwargs(8.0)]", 8.0, "code")):
        Path("train.py").write_text(f"{script}Accelerator({own})\n", encoding="utf-8")
        scale = setting(explained(capsys, "guarded.yaml", "train.py"), "grad_scaler.init_scale")
        assert (scale["value"], scale["source"]["layer"], scale["shadowed"]) == (value, layer, [])
    config.write_text(config.read_text() + "  mpguard_overrides: {initial_loss_scale: 1024.0}\n")
    scale = setting(explained(capsys, "guarded.yaml", "train.py"), "grad_scaler.init_scale")
    assert (scale["value"], scale["source"]["layer"]) == (1024.0, "override")
    assert [each["value"] for each in scale["shadowed"]] == [8.0]


def test_text_names_places_and_reasons(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert main(["explain", "mp.yaml", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "mixed_precision = fp16" in out and "train.py:4 (code)" in out
    assert "not no  ACCELERATE_MIXED_PRECISION (environment): the launcher sets this variable itself" in out
    assert "it is called `amax_history_len`" in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["explain", "mp.yaml", "train.py"]) == 0
    assert "├── " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "value", "layer", "number"),
    [
        ("accelerate launch --config_file mp.yaml --mixed_precision no \\\n  train.py", "fp16", "code", 4),
        ("accelerate launch --config_file mp.yaml --mixed_precision bf16 other.py", "bf16", "launch flag", 1),
        ("export ACCELERATE_MIXED_PRECISION=fp16\npython other.py", "fp16", "environment", 1),
        ("accelerate launch --config_file mp.yaml \\\n  hf.py --bf16 --output_dir x", "bf16", "TrainingArguments", 2),
    ],
)
def test_launch_lines(line: str, value: str, layer: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    hf = "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser(TrainingArguments)\n"
    Path("hf.py").write_text(hf)
    Path("run.sh").write_text(f"{line}\n")
    mode = setting(explained(capsys, "run.sh"), "mixed_precision")
    assert (mode["value"], mode["source"]["layer"], mode["source"]["line"]) == (value, layer, number)
    command = line.replace("export ", "").replace("\n", " ").replace("\\", "")
    given = setting(explained(capsys, "--launch", command), "mixed_precision")
    assert (given["value"], given["source"]["layer"]) == (value, layer)


def test_a_value_that_only_the_script_knows_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT.replace('"fp16"', "args.precision"))
    mode = setting(explained(capsys, "mp.yaml", "train.py"), "mixed_precision")
    assert mode["value"] == "unknown: args.precision"


def test_a_deepspeed_file_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """As `deepspeed.initialize` reads it, with no one who fills in `auto` (S8)."""
    Path("ds.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, "fp8": {}}\n')
    found = explained(capsys, "ds.json")
    low = setting(found, "bf16.enabled")
    assert low["value"] is False and low["shadowed"][0]["value"] == "auto"
    assert found["unread"] == [{"key": "fp8", "file": "ds.json", "line": 1}]


def test_a_run_that_stops_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    Path("no.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: no\nnum_processes: 2\n")
    assert main(["explain", "no.yaml"]) == 1
    assert "no.yaml:2: `mixed_precision`: is the boolean false" in capsys.readouterr().err


def test_a_config_in_the_wrong_place(capsys: pytest.CaptureFixture[str]) -> None:
    """S20: accelerate has no flag --config, and takes options after the script for the script's."""
    assert main(["explain", "--launch", "accelerate launch --config guarded.yaml train.py"]) == 1
    assert "has no flag --config" in capsys.readouterr().err
    assert main(["explain", "--launch", "accelerate launch train.py --config guarded.yaml"]) == 0
    out = capsys.readouterr().out
    assert "guarded.yaml comes after train.py" in out and "with mpguard's policy" not in out


def test_with_the_hook_accelerate_enforces_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpguard.cli.hook.installed", lambda: [tmp_path / "mpguard_hook.pth"])
    command = "accelerate launch --config guarded.yaml train.py"
    assert setting(explained(capsys, "--launch", command), "mixed_precision")["source"]["layer"] == "recipe"
    stock = explained(capsys, "--launch", command.replace("guarded", "mp"), status=1)
    assert setting(stock, "mixed_precision")["source"]["layer"] == "code"


def test_an_older_gpu_falls_back_to_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    Path("fp8.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: fp8\nnum_processes: 2\n")
    assert setting(explained(capsys, "fp8.yaml"), "mixed_precision")["value"] == "fp8"
    older = setting(explained(capsys, "fp8.yaml", "--gpu", "a100"), "mixed_precision")
    assert older["value"] == "fp16" and "S10" in older["shadowed"][0]["why"]


def test_live_shows_what_a_run_did(capsys: pytest.CaptureFixture[str]) -> None:
    Path("proof.json").write_text(json.dumps(PROOF))
    found = explained(capsys, "guarded.yaml", "--live", "proof.json", status=1)
    ran = setting(found, "observed.compute")
    assert (ran["value"], ran["source"]["layer"], ran["shadowed"][0]["value"]) == ("fp32", "proof", "bf16")
    changed = setting(found, "grad_reduce_in_fp32")
    assert changed["source"]["layer"] == "proof" and changed["shadowed"][0]["source"]["line"] == 9
    passed = {**PROOF, "verdict": "in force", "failures": [], "rows": [], "policy": {"bf16": True}}
    Path("proof.json").write_text(json.dumps(passed))
    assert setting(explained(capsys, "--live", "proof.json"), "bf16")["value"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope.yaml",), "nope.yaml: no such file"),
        (("train.py", "train.py"), "is a second training script"),
        (("--launch", "ls"), "has no launch line"),
        (("run.sh",), "run.sh: has 2 launch lines; name the script"),
        (("broken.py",), "broken.py:1: is not Python that mpguard can read"),
        (("broken.yaml",), "broken.yaml:"),
        (("other.json",), "is no config of accelerate, DeepSpeed, axolotl"),
        (("mp.yaml", "--live", "broken.yaml"), "is not a proof"),
        (("mp.yaml", "--live", "old.json"), "is a proof of version 0"),
        (("mp.yaml", "--live", "gone.json"), "gone.json: cannot be read"),
        (("mp.yaml", "--gpu", "abacus"), "there is no GPU `abacus`"),
        (("ds.yaml",), "names the DeepSpeed file `gone.json`, which does not exist"),
        (("sage.yaml",), "is for SageMaker"),
        (("--launch", "accelerate launch --config_file gone.yaml train.py"), "which does not exist"),
    ],
)
def test_bad_input_is_status_2(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text("accelerate launch a.py\naccelerate launch b.py\n")
    Path("broken.py").write_text("def (\n")
    Path("broken.yaml").write_text("a: [1\n")
    Path("other.json").write_text("{}")
    Path("old.json").write_text(json.dumps({**PROOF, "version": 0}))
    Path("ds.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\n")
    Path("sage.yaml").write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n")
    assert main(["explain", *words]) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert main(["explain"]) == 2
    assert "nothing to explain" in capsys.readouterr().err


def test_the_config_of_the_cache_is_used_as_accelerate_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache" / "accelerate" / "default_config.yaml"
    cache.parent.mkdir(parents=True)
    cache.write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    Path("other.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    mode = setting(explained(capsys, "--launch", "accelerate launch other.py"), "mixed_precision")
    assert (mode["value"], mode["source"]["file"]) == ("bf16", str(cache))


def test_it_imports_no_framework() -> None:
    code = (
        "import sys; from mpguard.cli import main; main(['explain', 'guarded.yaml', 'train.py']);"
        "heavy = {'torch', 'accelerate', 'transformers', 'deepspeed'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60))
    assert (done.returncode, done.stderr) == (0, "")


AUTOCASTS = """\
import torch

def train(model, x, precision, use_amp):
    with torch.autocast("cuda", dtype=precision):
        model(x)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=use_amp):
        model(x)
    with torch.autocast("cuda", enabled=False):
        model(x)
    with torch.cuda.amp.autocast():
        model(x)
"""


def test_each_autocast_is_shown_also_one_that_is_off_or_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.py").write_text(AUTOCASTS, encoding="utf-8")
    assert main(["explain", "plain.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("  plain.py")[0].strip() for line in lines[1:5]]
    assert shown == [
        'autocast = unknown: torch.autocast("cuda", dtype=precision)',
        "autocast = unknown: bf16, if use_amp",
        "autocast = off",
        "autocast = fp16",
    ]
    assert "creates no `Accelerator` and no `TrainingArguments`" in lines[5] and len(lines) == 6


def test_a_deepspeed_file_of_a_folder_beside_is_shown_by_its_shortest_path(capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").mkdir()
    Path("ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}', encoding="utf-8")
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config: {deepspeed_config_file: ../ds.json}\n"
    )
    Path("configs/accelerate.yaml").write_text(text, encoding="utf-8")
    found = setting(explained(capsys, "configs/accelerate.yaml"), "bf16.enabled")
    assert found["source"] == {"layer": "DeepSpeed JSON", "file": "ds.json", "line": 1}


OWN_SFT = """\
from dataclasses import dataclass, field
from trl import SFTConfig, TrlParser
@dataclass
class Own(SFTConfig):
"""


@pytest.mark.parametrize(
    ("script", "mode", "place"),
    [
        ("from trl import SFTConfig\nargs = SFTConfig(output_dir='o')\n", "bf16", 2),
        ("from trl import GRPOConfig\nargs = GRPOConfig(output_dir='o', fp16=False)\n", "bf16", 2),
        ("from trl import DistillationConfig\nargs = DistillationConfig(output_dir='o')\n", "bf16", 2),
        ("from trl import DPOConfig\nargs = DPOConfig(output_dir='o', bf16=False)\n", "fp8", None),
        ("from trl import DPOConfig\nargs = DPOConfig(output_dir='o', fp16=True)\n", "fp16", 2),
        ("from trl import SFTConfig, TrlParser\nargs = TrlParser((SFTConfig,)).parse()\n", "bf16", 2),
        ("from transformers import TrainingArguments\nargs = TrainingArguments(output_dir='o')\n", "fp8", None),
        (f"{OWN_SFT}    lora: bool = True\nargs = Own(output_dir='o')\n", "bf16", 6),
        (f"{OWN_SFT}    bf16: bool = False\nargs = Own(output_dir='o')\n", "fp8", None),
        (f"{OWN_SFT}    fp16: bool = field(default=True)\n_, args = TrlParser((M, Own)).parse()\n", "fp16", 5),
        (f"{OWN_SFT}    lora: bool = True\n_, args = TrlParser((M, Own)).parse()\n", "bf16", 6),
        (
            "from transformers import TrainingArguments\nclass Own(TrainingArguments):\n    seed: int = 1\n"
            "args = Own(output_dir='o', fp16=True)\n",
            "fp16",
            4,
        ),
    ],
)
def test_trls_configs_set_bf16_unless_fp16_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, mode: str, place: int | None
) -> None:
    from mpguard.explain import explain, gather

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    config = "distributed_type: MULTI_GPU\nmixed_precision: fp8\nnum_processes: 8\nfp8_config: {backend: AO}\n"
    (tmp_path / "mp.yaml").write_text(config)
    found = explain(gather([Path("mp.yaml"), Path("train.py")], environment={})).get("mixed_precision")
    assert found is not None and found.value == mode
    assert (found.origin.file, found.origin.line) == (("train.py", place) if place else ("mp.yaml", 2))


@pytest.mark.parametrize(
    ("parser", "line", "file", "mode", "place"),
    [
        ("TrlParser", "--config sft.yaml", "bf16: false\nfp16: true\n", "fp16", ("sft.yaml", 2)),
        ("TrlParser", "--config sft.yaml --bf16 true --fp16 false", "fp16: true\n", "bf16", ("--launch", None)),
        ("TrlParser", "--config sft.yaml", "learning_rate: 1.0e-4\n", "bf16", ("train.py", 2)),
        ("TrlParser", "--config gone.yaml", "", "unknown: in gone.yaml", None),
        ("HfArgumentParser", "args.json", '{"fp16": true}', "fp16", ("args.json", 1)),
        ("HfArgumentParser", "--output_dir o", "", "bf16", ("train.py", 2)),
    ],
)
def test_the_file_of_a_parser_sets_the_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parser: str,
    line: str,
    file: str,
    mode: str,
    place: tuple[str, int | None] | None,
) -> None:
    """TRL's parser reads `--config` below the command line, transformers' parser a file that is given alone."""
    from mpguard.explain import explain, gather

    monkeypatch.chdir(tmp_path)
    package = "trl" if parser == "TrlParser" else "transformers"
    text = f"from trl import SFTConfig; from {package} import {parser}\nargs = {parser}((SFTConfig,)).parse()\n"
    (tmp_path / "train.py").write_text(text)
    (tmp_path / ("args.json" if file.startswith("{") else "sft.yaml")).write_text(file)
    launch = f"accelerate launch train.py {line}"
    found = explain(gather([Path("train.py")], launch, environment={})).get("mixed_precision")
    assert found is not None and str(found.value) == mode
    if place is not None:
        assert (found.origin.file or "--launch", found.origin.line) == place


def test_a_value_that_is_the_one_in_force_and_an_argument_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    text = "import argparse\nfrom transformers import TrainingArguments\np = argparse.ArgumentParser()\n"
    text += "a = p.parse_args()\nTrainingArguments('out', bf16=a.bf16)\n"
    Path("hf.py").write_text(text, encoding="utf-8")
    Path("one.yaml").write_text("distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n", encoding="utf-8")
    assert main(["explain", "one.yaml", "hf.py"]) == 0
    printed = capsys.readouterr().out
    assert "one.yaml, hf.py · accelerate launch · 1 process · without mpguard" in printed
    assert "not bf16  one.yaml:2 (YAML): depends on the command line: used if `a.bf16` is False" in printed
    Path("hf.py").write_text(text.replace("argparse", "mine").replace("ArgumentP", "P").replace("parse_args", "read"))
    assert main(["explain", "one.yaml", "hf.py"]) == 0
    assert "(YAML): depends on the run: used if `a.bf16` is False" in capsys.readouterr().out
    assert main(["explain", "hf.py"]) == 0
    assert "hf.py · accelerate launch · without mpguard" in capsys.readouterr().out, "as many as the machine has GPUs"
    assert main(["init", "bf16_mixed", "-o", "guarded.yaml", "--force"]) == 0
    assert main(["explain", "guarded.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "    same value  guarded.yaml:5 (YAML)\n" in printed and "not bf16" not in printed


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        ("TrainingArguments('out', bf_16=True)", ("bf_16", "bf16")),
        ("SFTConfig(torch_compil=True)", ("torch_compil", "torch_compile")),
        ("TrainingArguments('out', bf16=True, torch_compile_mode='default', fp16_opt_level='O1')", None),
        ("Own('out', bf_16=True)", None),  # a field of its own
    ],
)
@pytest.mark.parametrize("launcher", ["accelerate", "mpguard"])
def test_a_misspelled_argument_about_precision_stops_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: str,
    meant: tuple[str, str] | None,
    launcher: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mp.yaml").write_text(
        "distributed_type: 'NO'\nmixed_precision: bf16\nfp8_config: {mpguard_recipe: bf16_mixed}\n"
    )
    Path("t.py").write_text(
        "from transformers import Trainer, TrainingArguments\nfrom trl import SFTConfig\n\n"
        f"class Own(TrainingArguments):\n    bf_16: bool = False\n\nTrainer(args={call})\n"
    )
    status = main(
        ["explain", "--launch", f"{launcher} launch --config{'_file' * (launcher != 'mpguard')} mp.yaml t.py"]
    )
    shown = capsys.readouterr().err
    if meant is None:
        assert status == 0 and "there is no argument" not in shown, shown
    else:
        assert status == 1, shown
        line = f"there is no argument `{meant[0]}`; the script stops with TypeError. Did you mean `{meant[1]}`?"
        assert f"t.py:7 (TrainingArguments): {line}" in shown
