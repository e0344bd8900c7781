"""`mpguard estimate`: text, JSON, the list, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.estimate import built_in
from mpguard.policy import hardware


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", hardware.Hardware)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.1-8b", "--gpus", "8", "--batch", "2", "--seq", "4096"]) == 0
    out = capsys.readouterr().out
    assert "llama-3.1-8b: 8.03 B parameters" in out and "bf16_mixed · fsdp2 · 8 GPUs · batch 2 x 4096 tokens" in out
    assert "activations" in out and "█" in out and "<- peak" in out
    assert "On h100 (fsdp2): largest batch:" in out


def test_the_first_line_answers_and_says_what_would_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["estimate", "llama-3.1-8b", "--gpu", "h200", "--checkpointing"]
    assert main([*model, "--optimizer", "adamw-fused"]) == 0
    assert capsys.readouterr().out.startswith("fits: yes, 120 of 140 GiB on h200\n")
    assert main(model) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("fits: no, short by 25 GiB on h200 (140 GiB; 165 needed")
    assert second.startswith("  what would make it fit: --optimizer adamw-fused; or ")


def test_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["estimate", "llama-3.1-8b", "--gpu", "a6000", "--checkpointing", "--lora", "16", "--quantize", "nf4"]
    assert main([*lora, "--targets", "q_proj,v_proj"]) == 0
    out = capsys.readouterr().out
    assert "fits: yes" in out and "8.04 B parameters, 6.82 M of them train" in out
    assert "lora 16 on q_proj,v_proj · base in nf4" in out
    assert main([*lora, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trained"] == 41_943_040 and found["fits_on"]["gpu"] == "a6000" and found["fits_on"]["fits"]


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1 and found["parameters"] == 1_235_814_400
    assert list(found["per_gpu"]) == [
        "parameters", "gradients", "master_weights", "optimizer", "activations", "logits", "buffers", "fp8", "context",
        "total",
    ]  # fmt: skip
    assert all(isinstance(size, int) for size in found["per_gpu"].values())
    assert found["per_gpu"]["total"] == sum(found["moments"][found["peak"]].values()) + found["per_gpu"]["context"]
    assert found["fits"]["h200"] is True and found["fits"]["rtx2080"] is False


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--list"]) == 0
    out = capsys.readouterr().out
    assert "llama-3.1-8b" in out and "qwen3_moe" in out
    assert main(["estimate", "--list", "--format", "json"]) == 0
    assert "gpt2" in json.loads(capsys.readouterr().out)["models"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "estimate needs a model"),
        (["llama-3"], "there is no built-in model `llama-3`; did you mean"),
        (["llama-3.2-1b", "--recipe", "bf61_mixed"], "there is no recipe `bf61_mixed`"),
        (["llama-3.2-1b", "--strategy", "zero2"], "there is no strategy `zero2`"),
        (["llama-3.2-1b", "--gpu", "h101"], "the memory of the GPU `h101` is not known; did you mean `h100`?"),
        (["llama-3.2-1b", "--lora", "0"], "--lora 0: the rank of LoRA is 1 or more"),
        (["llama-3.2-1b", "--quantize", "nf4"], "--quantize needs adapters: give their rank"),
        (["llama-3.2-1b", "--lora", "8", "--targets", "qproj"], "no Linear layer has this name; did you mean `q_proj`"),
        (["llama-3.2-1b", "--gpus", "0"], "gpus is 0; 1 or more is needed"),
        (["gpt2", "--seq", "4096"], "the model has 1024 positions"),
    ],
)
def test_what_cannot_be_estimated(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_architecture_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba", "hidden_size": 64}', encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["estimate", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}: the architecture `mamba` is not one of bart, bert" in err
    assert "pip install transformers torch" in err


def test_the_id_of_a_downloaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "models--someone--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc", encoding="utf-8")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(built_in()["llama-3.2-1b"]), encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main(["estimate", "someone/small"]) == 0
    assert "someone/small: 1.24 B parameters" in capsys.readouterr().out
    assert main(["estimate", "someone/smaller"]) == 2
    assert "there is no built-in model `someone/smaller`" in capsys.readouterr().err


def test_a_quantized_model_is_estimated_as_the_recipe_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    values = {**built_in()["llama-3.2-1b"], "quantization_config": {"quant_method": "bitsandbytes"}}
    path.write_text(json.dumps(values), encoding="utf-8")
    assert main(["estimate", str(path)]) == 0
    captured = capsys.readouterr()
    assert "1.24 B parameters" in captured.out and "`quantization_config` is not counted" in captured.err


@pytest.mark.parametrize(
    "recipe",
    ["fp32", "fp16_mixed", "bf16_full", "auto", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed"],
)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp1", "fsdp2", "deepspeed-zero1", "deepspeed-zero3"])
def test_each_recipe_and_strategy(recipe: str, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = "1" if strategy == "single" else "4"
    words = ["estimate", "qwen3-0.6b", "--recipe", recipe, "--strategy", strategy, "--gpus", gpus, "--format", "json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["per_gpu"]["total"] > 0
