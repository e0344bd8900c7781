"""One program per framework under `mpguard launch`, in one and in two processes: `make test-newest-short`.

`make test` has no Lightning, and leaves them out: tests/runtime runs programs of the pinned versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import seconds

pytest.importorskip("lightning", reason="installed by `make test-newest-short`")

PLAIN = """
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(3):
    loss = model(torch.randn(8, 16)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
"""

TRAINER = (
    LLAMA
    + """
arguments = TrainingArguments("out", max_steps=3, per_device_train_batch_size=2, report_to=[], bf16=True, use_cpu=True)
Trainer(model, arguments, train_dataset=rows).train()
"""
)

PEFT = (
    LLAMA
    + """
from peft import LoraConfig, get_peft_model

model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
arguments = TrainingArguments("out", max_steps=3, per_device_train_batch_size=2, report_to=[], bf16=True, use_cpu=True)
Trainer(model, arguments, train_dataset=rows).train()
"""
)

LIGHTNING = """
import os
import torch
import lightning
from torch import nn

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

processes = int(os.environ.get("WORLD_SIZE", "1"))
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(
    accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto", precision="bf16-mixed",
    max_steps=3, **options,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=4))
"""

TRL = (
    LLAMA
    + """
import tokenizers
import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

data = Dataset.from_list([{"input_ids": list(range(8))}] * 16)
arguments = SFTConfig("out", max_steps=3, per_device_train_batch_size=2, report_to=[], bf16=True, use_cpu=True)
inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(each): each for each in range(32)}, unk_token="0"))
own = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="0", eos_token="1")
SFTTrainer(model, args=arguments, train_dataset=data, processing_class=own).train()
"""
)

PROGRAMS = {"accelerate": PLAIN, "transformers": TRAINER, "peft": PEFT, "lightning": LIGHTNING, "trl": TRL}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_program_of_each_framework_is_proven(tmp_path: Path, framework: str, processes: int) -> None:
    if (framework, processes) == ("trl", 2):
        pytest.skip("TRL trains with transformers' Trainer")
    (tmp_path / "train.py").write_text(PROGRAMS[framework])
    kind = "MULTI_CPU" if processes > 1 else "'NO'"
    recipe = "mixed_precision: bf16\nfp8_config:\n  mpguard_recipe: bf16_mixed\n"
    (tmp_path / "mp.yaml").write_text(f"distributed_type: {kind}\nuse_cpu: true\nnum_processes: {processes}\n{recipe}")
    command = ["launch", "--config", "mp.yaml", "--proof-json", "proof.json", "train.py"]
    run = subprocess.run(
        [sys.executable, "-m", "mpguard", *command], cwd=tmp_path, capture_output=True, text=True, timeout=seconds(500),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert json.loads((tmp_path / "proof.json").read_text())["verdict"] == "in force"
