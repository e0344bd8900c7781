"""`fp8_modules` in runs: layers are converted when the optimizer is created, in each framework, and proven by group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")
pytest.importorskip("transformers", reason="the real library runs here")
pytest.importorskip("torchao", reason="the real library runs here")

from processes import in_fork, mp_yaml, proof, ranks_in_fork, transcript

SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
))
word, ids = sys.argv[1], torch.arange(64).view(4, 16)
if word == "trainer":
    from transformers import Trainer, TrainingArguments
    arguments = TrainingArguments("out", max_steps=4, per_device_train_batch_size=4, report_to=[], save_strategy="no",
                                  use_cpu=True, bf16=True, disable_tqdm=True)
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids] * 4).train()
    sys.exit()
backward = torch.Tensor.backward
if word == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif word == "compiled":
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if word == "zero2":
    import deepspeed
    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer, backward = model, model.backward
for _ in range(4):
    with torch.autocast("cpu", torch.bfloat16, enabled=word == "compiled"):
        loss = model(input_ids=ids, labels=ids).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

MODULES = (
    '[{pattern: "model.layers.0.self_attn.*", recipe: none}, {pattern: "*.mlp.*", recipe: rowwise}, '
    '{pattern: "*.q_proj", recipe: rowwise_with_gw_hp}]'
)
OVERRIDES = "{fp8_emulate: true, backend: torchao}"


ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}"},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 2}"},
}


def run(folder: Path, word: str, modules: str = MODULES) -> tuple[Any, dict[str, Any]]:
    (folder / "t.py").write_text(SCRIPT)
    own = f"{{mpguard_recipe: hopper_bf16_with_fp8_mixed, mpguard_overrides: {OVERRIDES}, "
    own += f"mpguard_fp8_modules: {modules}}}"
    engine = ENGINES.get(word, {})
    processes = 2 if engine else 1
    arguments = ["--config", mp_yaml(folder, num_processes=processes, fp8_config=own, **engine)]
    arguments += ["--proof-json", folder / "proof.json", "t.py", word]
    if processes == 1:
        ended = in_fork(arguments, cwd=folder)
    else:
        ended, _ = ranks_in_fork(arguments, cwd=folder, processes=processes)
    return ended, dict(proof(folder / "proof.json"))


@pytest.mark.parametrize("word", ["compiled", "trainer", "fsdp2", "zero2"])
def test_each_group_is_converted_and_proven(tmp_path: Path, word: str) -> None:
    if word == "zero2":
        pytest.importorskip("deepspeed", reason="the real library runs here")
    ended, made = run(tmp_path, word)
    assert ended.returncode == 0, transcript(ended)
    assert made["verdict"] == "in force", transcript(ended)
    row = made["rows"]["fp8 recipe"]
    assert row["found"] == "tensorwise 3, rowwise 6, rowwise_with_gw_hp 1, none 4" and row["ok"] is True, row
    assert "10 of 15 Linear layers in FP8 (torchao 3 tensorwise, 6 rowwise, 1 rowwise_with_gw_hp" in ended.stderr
    assert len(made["policy"]["fp8_modules"]) == 3


def test_a_pattern_that_matches_nothing_ends_the_run_and_names_a_similar_one(tmp_path: Path) -> None:
    ended, made = run(tmp_path, "plain", '[{pattern: "*.mpl.*", recipe: rowwise}]')
    assert ended.returncode == 1 and made["verdict"] == "not in force", transcript(ended)
    assert "`*.mpl.*` matches no layer; did you mean `*.mlp.*` (as model.layers.0.mlp.gate_proj)?" in ended.stderr
