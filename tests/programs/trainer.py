"""The Trainer of transformers with a small model; sets no precision."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        self.seen: set[str] = set()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(inputs)
        if self.training:
            self.seen.add(str(hidden.dtype))
        logits = self.second(hidden.relu())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
data = [{"inputs": torch.randn(16), "labels": torch.tensor(index % 4)} for index in range(32)]
resume = "--resume" in sys.argv
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=4 if resume else 2, per_device_train_batch_size=8, report_to=[],
    save_strategy="steps", save_steps=2, disable_tqdm=True, gradient_accumulation_steps=2,
)  # fmt: skip
model = Model()
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train(resume_from_checkpoint=str(Path("out") / "checkpoint-2") if resume else None)
print(json.dumps({"rank": 0, "compute": sorted(model.seen), "steps": trainer.state.global_step}), flush=True)
