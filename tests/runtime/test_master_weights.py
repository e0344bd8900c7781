"""`master_weights: optimizer` with the real engines: injected when the optimizer is created, and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, mp_yaml, proof, ranks_in_fork, results, transcript

PROGRAM = PROGRAMS / "master_weights.py"
FIELD = "mpguard_overrides: {master_weights: optimizer}"

#: Words of the program -> the config.
ENGINES: dict[str, dict[str, str]] = {
    "plain --resume": {},
    "plain --passes 4": {},
    "accelerate": {},
    "trainer": {},
    "ddp": {"distributed_type": "MULTI_CPU"},
    "ddp --last": {"distributed_type": "MULTI_CPU"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 1}"},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}"},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 2}"},
}


def run(folder: Path, words: str, field: str = FIELD) -> tuple[Any, dict[str, Any]]:
    keys = ENGINES.get(words, {})
    processes = 2 if "distributed_type" in keys else 1
    own = f"{{mpguard_recipe: bf16_mixed, {field}}}"
    config = mp_yaml(folder, num_processes=processes, fp8_config=own, **keys)
    arguments = ["--config", config, "--proof-json", folder / "proof.json", PROGRAM, *words.split()]
    if processes == 1:
        ended = in_fork(arguments, cwd=folder)
    else:
        ended, other = ranks_in_fork(arguments, cwd=folder, processes=processes)
        if "ddp" in words:
            assert results(ended)[0]["sums"] == results(other)[0]["sums"], "ranks have the same masters"
    return ended, dict(proof(folder / "proof.json")) if (folder / "proof.json").exists() else {}


@pytest.mark.parametrize("words", ENGINES)
def test_every_engine_has_fp32_masters_and_is_in_force(tmp_path: Path, words: str) -> None:
    ended, made = run(tmp_path, words)
    assert ended.returncode == 0, transcript(ended)
    found = results(ended)[0]
    assert made["verdict"] == "in force", transcript(ended)
    rows = made["rows"]
    assert rows["optimizer"]["found"].endswith("weights fp32, states fp32"), rows
    sharded = words.startswith(("fsdp", "zero"))
    held = "fp32" if words.startswith("fsdp") else "bf16"
    assert rows["parameters"]["found"].startswith(held) and rows["parameters"]["asked"] == held
    assert rows["gradients"]["found"] == ("fp32" if sharded or "passes" in words else "bf16"), rows
    if "passes" in words:
        assert (rows["accumulation"]["found"], rows["accumulation"]["ok"]) == ("fp32, 3 passes", True)
    if words.startswith("ddp"):
        assert rows["reduction"]["found"].startswith("fp32"), rows
    assert found["parameters"] == ["bfloat16" if held == "bf16" else "float32"]
    assert found["losses"][-1] < found["losses"][0]


EXPERTS = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
))
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW([{"params": model.model.parameters()}], lr=1e-2)
ids = torch.arange(64).view(4, 16)
for number in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
    if number == 1:
        model.save_pretrained("saved")
gate = model.model.layers[0].mlp.gate.weight
tied = model.lm_head.weight is model.model.embed_tokens.weight
print("SEEN", gate.dtype, model.model.layers[0].mlp.experts.down_proj.dtype, tied)
"""


def test_experts_tied_weights_and_checkpointing_with_modules_in_fp32(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the real library runs here")
    (tmp_path / "t.py").write_text(EXPERTS)
    own = "{mpguard_recipe: bf16_mixed, mpguard_overrides: {master_weights: optimizer, fp32_modules: ['*.gate']}}"
    ended = in_fork(
        ["--config", mp_yaml(tmp_path, fp8_config=own), "--proof-json", tmp_path / "proof.json", "t.py"], cwd=tmp_path
    )
    assert ended.returncode == 0, transcript(ended)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "in force" and made["rows"]["optimizer"]["found"].endswith("weights fp32, states fp32")
    assert "SEEN torch.float32 torch.bfloat16 True" in ended.stdout, "the router stays in FP32"
    losses = [float(line) for line in ended.stdout.splitlines() if line[:1].isdigit()]
    assert losses[-1] < losses[0], transcript(ended)


OWN_MASTERS = """
import torch
class FusedAdam(torch.optim.AdamW):
    def __init__(self, own):
        self.master_weights = True
        super().__init__(own)
FusedAdam(torch.nn.Linear(16, 16).parameters())
"""


def test_an_optimizer_with_masters_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(OWN_MASTERS)
    own = f"{{mpguard_recipe: bf16_mixed, {FIELD}}}"
    ended = in_fork(["--config", mp_yaml(tmp_path, fp8_config=own), "t.py"], cwd=tmp_path)
    assert ended.returncode == 1, transcript(ended)
    assert "master_weights: FusedAdam was created with master weights of its own" in ended.stderr
    assert "To go without: mpguard_overrides: {master_weights: model}" in ended.stderr
