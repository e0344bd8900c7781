"""Keys and values that a newer program may have: reported by all four commands, and refused by none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.core.errors import MpguardError
from mpguard.document import read
from mpguard.document.newer import may_be_new
from mpguard.runtime.launch import preflight

ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 1\n"
    "fp8_config: {mpguard_recipe: bf16_mixed}\n"
)
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, %s}'
AXOLOTL = "base_model: m\ndatasets: [{path: d, type: alpaca}]\nbf16: true\nfp8: true\ntorch_compile: true\n"
#: distribution -> file, its text with something new, the recipe that it has, the clause.
NEW = {
    "accelerate": (
        "mp.yaml", ACCELERATE + "dynamo_config: {dynamo_backend: NEWEST}\n", "bf16_mixed",
        "`dynamo_config.dynamo_backend`: is a value that may be new: mpguard knows accelerate up to 1.15.0, and 99.1",
    ),
    "deepspeed": (
        "ds.json", DEEPSPEED % '"bf16": {"enabled": true, "newer": 1}', "bf16_mixed",
        "`bf16.newer`: is a key that may be new: mpguard knows DeepSpeed up to 0.19.8, and 99.1 is installed",
    ),
    "axolotl": (
        "a.yml", AXOLOTL + "fp8_config: {recipe: mxfp8}\n", "hopper_bf16_with_fp8_mixed",
        "`fp8_config.recipe`: is a value that may be new: mpguard knows axolotl up to 0.19.0, and 99.1 is installed",
    ),
    "llamafactory": (
        "lf.yaml",
        "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: full\nbf16: true\nfp8: true\n"
        "fp8_backend: nvfp4\n",
        "bf16_with_fp8_rowwise_mixed",
        "`fp8_backend`: is a value that may be new: mpguard knows LLaMA-Factory up to 0.9.5, and 99.1 is installed",
    ),
}  # fmt: skip


def install(folder: Path, distribution: str, version: str) -> None:
    info = folder / "site" / f"{distribution}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


@pytest.mark.parametrize("distribution", NEW)
def test_what_may_be_new_is_reported_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], distribution: str
) -> None:
    name, text, recipe, clause = NEW[distribution]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main(["explain", name]) == 1 and "the run stops" in capsys.readouterr().err
    install(tmp_path, distribution, "99.1")
    monkeypatch.syspath_prepend(tmp_path / "site")
    main(["lint", "--no-cache", "--isolated", name])
    linted = " ".join(capsys.readouterr().out.split())
    assert clause in linted and "warning" in linted
    assert main(["explain", name]) == 0
    assert clause in " ".join(capsys.readouterr().out.split())
    main(["apply", "--check", recipe, name])
    applied = " ".join(capsys.readouterr().out.split())
    assert "matches" not in applied and "problem:" not in applied
    assert clause in applied or "mxfp8 -> tensorwise" in applied or "nvfp4 -> " in applied


def test_a_launch_leaves_the_decision_to_a_newer_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="it is asked for its keys")
    name, text, _, clause = NEW["accelerate"]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(MpguardError, match="is NEWEST"):
        preflight.check_named_config(["--config", str(path), "train.py"])
    install(tmp_path, "accelerate", "99.1")
    monkeypatch.syspath_prepend(tmp_path / "site")
    preflight.check_named_config(["--config", str(path), "train.py"])
    assert any(clause in line for line in preflight.ignored_keys(read(path)))
    path.write_text(ACCELERATE + "num_procesess: 2\n")  # which the accelerate that runs here does not have
    with pytest.raises(MpguardError, match="the installed accelerate has no such key; did you mean `num_processes`"):
        preflight.check_named_config(["--config", str(path), "train.py"])


@pytest.mark.parametrize(
    ("version", "is_newer"), [("1.15.0", False), ("1.14.2", False), ("1.15.1", True), ("x", False)]
)
def test_only_a_newer_version_may_have_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_newer: bool
) -> None:
    install(tmp_path, "accelerate", version)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert (may_be_new("key", "accelerate") is not None) is is_newer
    assert may_be_new("key", "deepspeed") is None, "it is not installed there"
