"""`fp8_experts` with the real engines: experts are converted when the optimizer is created, and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")
pytest.importorskip("transformers", minversion="5.2", reason="before, experts call torch's operator themselves")
pytest.importorskip("torchao", reason="the real library runs here")

from processes import in_fork, mp_yaml, proof, ranks_in_fork, transcript

SCRIPT = """
import sys
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, use_cache=False,
))
if "checkpoints" in sys.argv:
    model.gradient_checkpointing_enable()
engine = sys.argv[1]
if engine in ("ddp", "fsdp2"):
    torch.distributed.init_process_group("gloo")
if engine == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
elif engine == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block.mlp.experts, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
if "compiled" in sys.argv:
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if engine.startswith("zero"):
    import deepspeed
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": int(engine[-1])}}
    config |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ids = torch.arange(64).view(4, 16)
for number in range(4):
    with torch.autocast("cpu", torch.bfloat16, enabled=not engine.startswith(("fsdp", "zero"))):
        loss = model(input_ids=ids, labels=ids).loss
    if engine.startswith("zero"):
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("LOSS", loss.item())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

FP8 = "{mpguard_recipe: bf16_with_fp8_rowwise_mixed, mpguard_overrides: {fp8_emulate: true, fp8_experts: true}}"

#: Words of the script -> the config.
ENGINES: dict[str, dict[str, str]] = {
    "checkpoints": {},
    "compiled": {},
    "ddp": {"distributed_type": "MULTI_CPU"},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}"},
    "zero3": {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 3}"},
}


def run(folder: Path, word: str) -> tuple[Any, dict[str, Any]]:
    (folder / "t.py").write_text(SCRIPT)
    keys = ENGINES[word]
    processes = 2 if keys else 1
    arguments = ["--config", mp_yaml(folder, num_processes=processes, fp8_config=FP8, **keys)]
    arguments += ["--proof-json", folder / "proof.json", "t.py", word]
    if processes == 1:
        ended = in_fork(arguments, cwd=folder)
    else:
        ended, _ = ranks_in_fork(arguments, cwd=folder, processes=processes)
    return ended, dict(proof(folder / "proof.json"))


@pytest.mark.parametrize("word", ENGINES)
def test_experts_are_converted_and_proven(tmp_path: Path, word: str) -> None:
    ended, made = run(tmp_path, word)
    assert ended.returncode == 0, transcript(ended)
    assert made["verdict"] == "in force", transcript(ended)
    losses = [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("LOSS")]
    assert losses[-1] < losses[0]
    row, share = made["rows"]["fp8 experts"], made["rows"]["fp8 products"]["found"]
    names = [f"model.layers.{number}.mlp.experts" for number in range(2)]
    assert row["ok"] is True and all(name in row["found"] for name in names), row
    assert "experts in FP8 in 2 of 2 modules" in ended.stderr
    assert int(share.split()[0]) > 75, share
