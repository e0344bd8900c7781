"""DeepSpeed's config of a script that creates the engine itself."""

import json
from pathlib import Path

import pytest

from mpguard.cli import main

SCRIPT = """\
import deepspeed

engine, *_ = deepspeed.initialize({arguments}, model=model)
"""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("args=args", ["ds.json"]), ('config="ds.json"', []), ("args=args", ["--launch", "LAUNCH"])],
)
def test_the_engine_reads_its_file_without_accelerate(
    arguments: str,
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}', "utf-8")
    Path("train.py").write_text(SCRIPT.format(arguments=arguments), "utf-8")
    launch = "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json"
    words = [launch if word == "LAUNCH" else word for word in named]
    assert main(["explain", "train.py", *words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (bf16,) = [each for each in found["settings"] if each["key"] == "bf16.enabled"]
    assert bf16["value"] is False and "auto" in json.dumps(bf16)
    assert not any(each["key"] in ("bf16", "zero_optimization") for each in found["unread"])


def test_what_nobody_fills_in_stops_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Trainer and accelerate fill in "auto"; DeepSpeed drops it in sections, and compares it elsewhere."""
    monkeypatch.chdir(tmp_path)
    zero = '"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}'
    sizes = '"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"'
    Path("ds.json").write_text(f'{{\n{sizes}, "bf16": {{"enabled": true}}, {zero}}}', "utf-8")
    Path("train.py").write_text(SCRIPT.format(arguments='config="ds.json"'), "utf-8")
    assert main(["explain", "train.py"]) == 1
    told = capsys.readouterr().err
    for key in ("train_micro_batch_size_per_gpu", "gradient_clipping"):
        assert f'ds.json:2: `{key}` is "auto", and the script passes the config to deepspeed.initialize itself' in told
    assert "reduce_bucket_size" not in told
    Path("train.py").write_text(
        'from transformers import TrainingArguments\nargs = TrainingArguments("o", bf16=True, deepspeed="ds.json")\n'
    )
    assert main(["explain", "train.py"]) == 0


def test_the_params_of_what_deepspeed_creates_are_not_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    params = '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"params": {"warmup": "auto"}}'
    Path("ds.json").write_text(f'{{"train_micro_batch_size_per_gpu": 2, {params}}}', "utf-8")
    for arguments, keys in {
        'config="ds.json"': ["optimizer.params.lr", "scheduler.params.warmup"],
        'optimizer=own, config="ds.json"': ["scheduler.params.warmup"],
        'optimizer=own, lr_scheduler=ours, config="ds.json"': [],
    }.items():
        Path("train.py").write_text(SCRIPT.format(arguments=arguments), "utf-8")
        assert main(["explain", "train.py"]) == bool(keys)
        told = capsys.readouterr().err
        assert [key for key in ("optimizer.params.lr", "scheduler.params.warmup") if key in told] == keys


@pytest.mark.parametrize(
    ("stage", "more", "status"),
    [
        (2, "", 1),
        (1, "", 0),
        (2, ", mpguard_allow: [{states: bf16}]", 0),
    ],
)
def test_muon_whose_momentum_would_be_in_bf16_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: int,
    more: str,
    status: int,
) -> None:
    """As the engine is, which a launch would refuse after it has started."""
    monkeypatch.chdir(tmp_path)
    zero = f'"zero_optimization": {{"stage": {stage}}}, "bf16": {{"enabled": true}}'
    Path("ds.json").write_text(
        f'{{"train_micro_batch_size_per_gpu": 8, {zero}, "optimizer": {{"type": "Muon", "params": {{"lr": 0.02}}}}}}'
    )
    Path("mp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 1\n"
        f"deepspeed_config: {{deepspeed_config_file: ds.json}}\nfp8_config: {{mpguard_recipe: bf16_mixed{more}}}\n"
    )
    Path("train.py").write_text("from accelerate import Accelerator\n\naccelerator = Accelerator()\n")
    assert main(["explain", "mp.yaml", "train.py"]) == status
    told = capsys.readouterr().err
    assert ("`optimizer.type`: DeepSpeed's ZeRO-2 holds the momentum of Muon in bf16" in told) is bool(status)
