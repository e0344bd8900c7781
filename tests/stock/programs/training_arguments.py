"""Train with the Trainer of transformers and `bf16=True`, in an environment that may set FP8."""

from __future__ import annotations

import json
import sys

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def arguments(**more: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir="out", use_cpu=True, max_steps=1, per_device_train_batch_size=16, report_to=[],
        save_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip


data = [{"inputs": torch.randn(16), "labels": torch.tensor(index % 4)} for index in range(16)]
unset = arguments().mixed_precision
trainer = Trainer(model=Model(), args=arguments(bf16=True), train_dataset=data)
trainer.train()
kinds = [type(layer).__name__ for layer in trainer.model.layers]
mode = trainer.accelerator.mixed_precision
sys.stdout.write(json.dumps({"rank": 0, "unset": unset, "mode": mode, "kinds": kinds}) + "\n")
