"""The DeepSpeed file that axolotl and LLaMA-Factory configs name: explain and apply report what it contradicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.cli import main

FACTORY = "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: full\ndeepspeed: ds.json\n"
AXOLOTL = "base_model: m\nmicro_batch_size: 2\nadapter: lora\ndeepspeed: ds.json\n"
ON, OFF, AUTO = ('{"enabled": true}', '{"enabled": false}', '{"enabled": "auto"}')


@pytest.mark.parametrize(
    ("config", "recipe", "bf16", "fp16", "clauses"),
    [
        (
            FACTORY + "bf16: true\n",
            "bf16_mixed",
            OFF,
            ON,
            ("`bf16.enabled` is false in ds.json", "`fp16.enabled` is true in ds.json"),
        ),
        (FACTORY + "bf16: true\n", "bf16_mixed", AUTO, AUTO, ()),
        (FACTORY + "pure_bf16: true\n", "bf16_full", AUTO, AUTO, ("`pure_bf16`: LLaMA-Factory stops with ZeRO-3",)),
        (AXOLOTL + "bf16: false\nfp16: true\n", "fp16_mixed", ON, AUTO, ("`bf16.enabled` is true in ds.json",)),
        (AXOLOTL + "bf16: auto\n", "bf16_mixed", ON, OFF, ()),
        (AXOLOTL + "bfloat16: true\nbf16: false\n", "bf16_full", ON, OFF, ()),
    ],
)
def test_what_the_deepspeed_file_contradicts_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str,
    recipe: str,
    bf16: str,
    fp16: str,
    clauses: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(config)
    Path("ds.json").write_text(f'{{"zero_optimization": {{"stage": 3}}, "bf16": {bf16}, "fp16": {fp16}}}')
    assert main(["explain", "train.yaml"]) == bool(clauses)
    explained = capsys.readouterr()
    assert "train.yaml, ds.json" in explained.out and "bf16.enabled = " in explained.out
    for clause in clauses:
        assert clause in explained.err
    main(["apply", "--check", recipe, "train.yaml"])
    alone = capsys.readouterr().out
    assert "the precision is set in ds.json too" in alone and ("problem: " in alone) == bool(clauses)
    main(["apply", recipe, "train.yaml", "ds.json"])
    if "pure_bf16" not in config:  # which ZeRO-3 excludes
        assert main(["explain", "train.yaml"]) == 0, capsys.readouterr().err


def test_a_file_that_is_not_here_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FACTORY + "bf16: true\n")
    assert main(["explain", str(path)]) == 0
    assert "`ds.json`, DeepSpeed's config, is not here" in capsys.readouterr().out
