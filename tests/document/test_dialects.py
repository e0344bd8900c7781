"""Configs of training programs, written after their own documentation: linted, explained and applied.

axolotl 0.19.0 (docs: mixed precision, FSDP), LLaMA-Factory 0.9.5 (examples/extras/fp8), Megatron Bridge 067f987
(docs: mixed precision, YAML overrides), NeMo 1.23 (megatron_gpt_config.yaml).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpguard.cli import main
from mpguard.document import dialects, parse
from mpguard.targets.plugin import get

AXOLOTL = "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - path: tatsu-lab/alpaca\n    type: alpaca\n"
FACTORY = "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
BRIDGE = "model:\n  seq_length: 4096\ntrain:\n  train_iters: 20\nddp:\n  use_distributed_optimizer: true\n"
NEMO = "trainer:\n  devices: 8\n  precision: {precision}\nmodel:\n  micro_batch_size: 4\n  megatron_amp_O2: {o2}\n"

#: kind -> files: name -> the text, the compute dtype that it means, and the rules that report it.
FILES: dict[str, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "axolotl": {
        "lora, bf16 auto": (AXOLOTL + "adapter: lora\nbf16: auto\ntf32: false\n", "bf16", ()),
        "full fine-tuning": (AXOLOTL + "micro_batch_size: 1\nbf16: true\ntf32: true\n", "bf16", ()),
        "fp8 with compile": (AXOLOTL + "bf16: true\nfp8: true\ntorch_compile: true\n", "bf16", ()),
        "fp8 under FSDP2": (
            AXOLOTL + "bf16: true\nfp8: true\nfp8_enable_fsdp_float8_all_gather: true\n"
            "torch_compile: true\nfsdp_version: 2\nfsdp_config:\n  offload_params: false\n"
            "  reshard_after_forward: true\n"
            "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  transformer_layer_cls_to_wrap: LlamaDecoderLayer\n",
            "bf16", (),
        ),
        "rowwise fp8": (
            AXOLOTL + "bf16: true\nfp8: true\nfp8_config:\n  recipe: rowwise\ntorch_compile: true\n", "bf16", (),
        ),
        "norms in fp32": (
            AXOLOTL + "bf16: true\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\nfp32_norms: true\n",
            "bf16", (),
        ),
        "fp8_config without fp8": (
            AXOLOTL + "bf16: true\nfp8_config:\n  recipe: rowwise\n", "refused bf16", ("MPG849",),
        ),
        "a key of a later version": (AXOLOTL + "bf16: true\nfp8_grouped_experts: true\n", "bf16", ("MPG813",)),
        "a section of a later version": (
            AXOLOTL + "bf16: true\nfp4_config:\n  recipe: nvfp4\n", "bf16", ("MPG813",),
        ),
        "a later key of FSDP": (
            AXOLOTL + "bf16: true\nfsdp_config:\n  reshard_after_forward: true\n  reduce_in_fp32: false\n",
            "bf16", ("MPG813",),
        ),
    },
    "llamafactory": {
        "bf16": (FACTORY + "bf16: true\n", "bf16", ()),
        "fp16, lora": (FACTORY.replace("full", "lora") + "fp16: true\n", "fp16", ()),
        "pure bf16": (FACTORY + "pure_bf16: true\n", "bf16", ()),
        "fp8, FSDP": (
            FACTORY + "bf16: true\nfsdp: full_shard auto_wrap\nfsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
            "fp8: true\nfp8_backend: torchao\nfp8_enable_fsdp_float8_all_gather: true\n",
            "bf16", (),
        ),
        "fp8, te": (FACTORY + "bf16: true\nfp8: true\nfp8_backend: te\ndeepspeed: ds_z3.json\n", "bf16", ()),
        "a misspelt backend": (FACTORY + "bf16: true\nfp8: true\nfp8_backand: te\n", "refused bf16", ("MPG813",)),
    },
    "megatron-bridge": {
        "a recipe by name": ("mixed_precision: bf16_mixed\n" + BRIDGE, "bf16", ()),
        "fp8 by name, with hyphens": ("mixed_precision: bf16-with-mxfp8-mixed\n" + BRIDGE, "bf16", ()),
        "fields of the config": (
            "mixed_precision:\n  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig\n"
            "  bf16: true\n  params_dtype:\n    _target_: torch.bfloat16\n    _call_: false\n"
            "  fp8: hybrid\n  fp8_recipe: tensorwise\n"
            "  fp8_amax_history_len: 1024\n  fp8_param_gather: true\n" + BRIDGE,
            "bf16", (),
        ),
        "switched off, model has it": (
            "mixed_precision: null\n"
            + BRIDGE.replace("model:\n", "model:\n  bf16: true\n  params_dtype: torch.bfloat16\n"),
            "bf16", (),
        ),
        "no precision": (BRIDGE, "unset", ()),
        "no section of its own": (
            BRIDGE.partition("ddp:")[0] + "scheduler:\n  lr_warmup_iters: 10\nlogger:\n  log_interval: 1\n",
            "unset", (),
        ),
        "an unknown recipe": ("mixed_precision: bf16_mixd\n" + BRIDGE, "", ("MPG849",)),
        "both modes": (
            "mixed_precision:\n  bf16: true\n  fp16: true\n" + BRIDGE, "", ("MPG849",),
        ),
        "a later format": (
            "mixed_precision: bf16_mixed\n" + BRIDGE.replace("model:\n", "model:\n  fp6_recipe: mxfp6\n"),
            "bf16", ("MPG813",),
        ),
        "overwritten": (
            "mixed_precision: bf16_mixed\n" + BRIDGE.replace("model:\n", "model:\n  bf16: false\n"),
            "bf16", ("MPG849",),
        ),
    },
    "nemo": {
        "bf16, O2": (NEMO.format(precision="bf16", o2="true"), "bf16", ()),
        "bf16-mixed, autocast": (NEMO.format(precision="bf16-mixed", o2="false"), "bf16", ()),
        "fp16": (
            NEMO.format(precision=16, o2="false") + "  native_amp_init_scale: 65536\n  hysteresis: 2\n", "fp16", (),
        ),
        "fp32": (NEMO.format(precision=32, o2="false"), "fp32", ()),
        "fp8": (
            NEMO.format(precision="bf16", o2="true") + "  transformer_engine: true\n  fp8: true\n  fp8_hybrid: true\n"
            "  fp8_e4m3: false\n  fp8_margin: 0\n  fp8_interval: 1\n  fp8_amax_history_len: 1024\n"
            "  fp8_amax_compute_algo: max\n  reduce_amax: true\n",
            "bf16", (),
        ),
        "the defaults of the example": (
            NEMO.format(precision=16, o2="false") + "  transformer_engine: false\n  fp8: false\n  fp8_e4m3: false\n"
            "  fp8_hybrid: false\n  fp8_amax_compute_algo: most_recent\n",
            "fp16", (),
        ),
        "a later section": (
            NEMO.format(precision="bf16", o2="true") + "  fp8_config:\n    recipe: mx\n", "bf16", ("MPG813",),
        ),
        "fp8 without te": (
            NEMO.format(precision="bf16", o2="true") + "  transformer_engine: false\n  fp8: true\n", "", ("MPG849",),
        ),
    },
}  # fmt: skip
CASES = [
    pytest.param(kind, *file, id=f"{kind}, {name}") for kind, files in FILES.items() for name, file in files.items()
]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.yaml"
    path.write_text(text)
    return path


def linted(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    main(["lint", "--no-cache", "--isolated", "--format", "json", str(path)])
    return [each["code"] for each in json.loads(capsys.readouterr().out)["findings"]]


def test_each_dialect_has_a_plugin_a_schema_and_five_files() -> None:
    assert set(FILES) == set(dialects.DIALECTS)
    for kind, dialect in dialects.DIALECTS.items():
        assert len(FILES[kind]) >= 5 and dialect.version and dialect.title in dialects.KNOWN
        assert get(kind)._reader is not None and get(kind)._detector is not None


@pytest.mark.parametrize(("kind", "text", "compute", "codes"), CASES)
def test_files_are_recognized_linted_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str, compute: str, codes: tuple[str, ...]
) -> None:
    path = write(tmp_path, text)
    assert parse(text, str(path)).kind == kind
    found = set(linted(path, capsys)) - {"MPG401"}  # a run without compile
    assert found == set(codes)
    status = main(["explain", str(path), "--format", "json"])
    printed = capsys.readouterr()
    explained: dict[str, Any] = {each["key"]: each["value"] for each in json.loads(printed.out)["settings"]}
    known = {"": (1, None), "unset": (0, None), "refused bf16": (1, "bf16")}.get(compute, (0, compute))
    assert (status, explained.get("compute_dtype")) == known, printed.err


@pytest.mark.parametrize(("kind", "text", "compute", "codes"), CASES)
def test_a_recipe_is_written_into_each_file_and_matches_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str, compute: str, codes: tuple[str, ...]
) -> None:
    path = write(tmp_path, text)
    refused = kind == "llamafactory" and "MPG813" in codes  # which stops at a key that it does not have
    for recipe in ("fp16_mixed", "bf16_mixed"):
        assert main(["apply", recipe, str(path)]) == refused, capsys.readouterr().err
        capsys.readouterr()
        assert main(["apply", "--check", recipe, str(path)]) == refused
        shown = capsys.readouterr().out
        if refused:
            assert "problem: " in shown and "matches" not in shown
        elif "MPG813" in codes:
            assert "keys that mpguard does not know" in shown and "matches" not in shown
        else:
            assert f"matches {recipe}" in shown
        assert main(["explain", str(path), "--format", "json"]) == refused
        values = {each["key"]: each["value"] for each in json.loads(capsys.readouterr().out)["settings"]}
        assert values["compute_dtype"] == recipe[:4]
    made = yaml.safe_load(path.read_text())
    kept = {key: value for key, value in yaml.safe_load(text).items() if isinstance(value, (list, int, float))}
    assert all(made.get(key) == value for key, value in kept.items() if not isinstance(value, bool))


@pytest.mark.parametrize(
    ("kind", "recipe", "expected"),
    [
        ("axolotl", "bf16_with_fp8_rowwise_mixed", {"fp8_config": {"recipe": "rowwise"}, "torch_compile": True}),
        ("axolotl", "hopper_bf16_with_fp8_mixed", {"fp8": True, "torch_compile": True, "bf16": True}),
        ("axolotl", "bf16_full", {"bf16": False, "bfloat16": True}),
        ("llamafactory", "bf16_with_fp8_rowwise_mixed", {"fp8": True, "fp8_backend": "torchao", "torch_compile": True}),
        ("llamafactory", "bf16_full", {"pure_bf16": True}),
        ("megatron-bridge", "bf16_with_fp8_current_scaling_mixed",
         {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}),
        ("nemo", "bf16_with_fp8_delayed_scaling_mixed", {"transformer_engine": True, "fp8": True, "fp8_hybrid": True}),
    ],
)  # fmt: skip
def test_what_fp8_becomes(tmp_path: Path, kind: str, recipe: str, expected: dict[str, Any]) -> None:
    path = write(tmp_path, next(iter(FILES[kind].values()))[0])
    assert main(["apply", recipe, str(path)]) == 0
    made = yaml.safe_load(path.read_text())
    made |= made["model"] if kind == "nemo" else {}
    assert (
        made.items() >= expected.items()
        if all(not isinstance(v, dict) for v in expected.values())
        else all(made[key] == value for key, value in expected.items())
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("verl", "actor_rollout_ref:\n  actor:\n    fsdp_config:\n      dtype: bfloat16\n"),
        ("ms-swift", "model: Qwen/Qwen2.5-7B\ntrain_type: lora\ntorch_dtype: bfloat16\ndataset: a\n"),
        ("NeMo-RL", "policy:\n  precision: bfloat16\ncluster:\n  num_nodes: 1\ngrpo:\n  max_num_steps: 1\n"),
        (
            "torchtitan",
            "job:\n  dump_folder: out\ntraining:\n  mixed_precision_param: bfloat16\nparallelism:\n  dp: 1\n",
        ),
        ("Lightning", "seed_everything: 1\ntrainer:\n  precision: bf16-mixed\nmodel:\n  class_path: net.Net\n"),
    ],
)
def test_other_programs_are_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    path = write(tmp_path, text)
    line = f"is a config of {name}, which mpguard does not read; it reads those of {dialects.KNOWN}"
    for words, status in ((["apply", "bf16_mixed"], 2), (["explain"], 2), (["lint", "--no-cache", "--isolated"], 0)):
        assert main([*words, str(path)]) == status
        assert capsys.readouterr().err.count(line) == 1
    assert path.read_text() == text


def test_a_config_of_nobody_names_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "learning_rate: 1\nlayers: 2\n")
    assert main(["explain", str(path)]) == 2
    assert "its keys are `learning_rate`, `layers`" in capsys.readouterr().err


BRIDGE_SCRIPT = (
    "import torch\nfrom megatron.bridge.recipes.llama import llama32_1b_pretrain_config\n"
    "from megatron.bridge.training.config import ConfigContainer\n"
    "from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, bf16_with_mxfp8_mixed\n"
    "from megatron.bridge.training.pretrain import pretrain\n\n"
    "cfg = llama32_1b_pretrain_config()\n{}\npretrain(cfg, forward_step)\n"
)
#: Lines of a script of Megatron Bridge -> what explain prints (or the clause with which it stops), with its status.
BRIDGE_CODE = {
    'cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"': (0, "policy.fp8 = hybrid"),
    "cfg.mixed_precision = bf16_with_mxfp8_mixed()\ncfg.mixed_precision.fp8_margin = 0": (0, "fp8_recipe = mxfp8"),
    'cfg = ConfigContainer(mixed_precision=MixedPrecisionConfig(bf16=True, params_dtype=torch.bfloat16, fp8="hybrid",'
    ' fp8_recipe="tensorwise", fp8_amax_history_len=1024))': (0, "mixed_precision.params_dtype = bf16"),
    "cfg.mixed_precision = MixedPrecisionConfig(fp16=True, params_dtype=torch.half)": (0, "compute_dtype = fp16"),
    'cfg.mixed_precision = "bf16_with_mxpf8_mixed"': (1, "Megatron Bridge has no recipe `bf16_with_mxpf8_mixed`; did"),
    'cfg.mixed_precision = MixedPrecisionConfig(bf16=True, fp8="e5m2")': (1, "`mixed_precision.fp8`: is e5m2; did you"),
}


@pytest.mark.parametrize("lines", BRIDGE_CODE)
def test_code_of_megatron_bridge_is_linted_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text(BRIDGE_SCRIPT.format(lines))
    status, clause = BRIDGE_CODE[lines]
    assert main(["explain", "run.py"]) == status
    told = "".join(capsys.readouterr())
    assert "run.py · Megatron Bridge" in told and clause in told.replace("`run.py", "run.py")
    assert main(["lint", "--no-cache", "--isolated", "run.py"]) == status
    assert ("MPG849" in capsys.readouterr().out) is bool(status)
    assert main(["apply", "--check", "bf16_mixed", "run.py"]) == 2
    assert 'Write `config.mixed_precision = "bf16_mixed"` in it' in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "expected"), [("fp32", False), ("bf16", False), ("bf16_mixed", True)])
def test_a_config_of_another_program_with_an_optimizer_is_none_of_megatron_bridge(
    precision: str, expected: bool
) -> None:
    from mpguard_plugins.megatron_bridge import is_config

    assert is_config({"optimizer": {"lr": 1e-4}, "training": {}, "mixed_precision": precision}) is expected
