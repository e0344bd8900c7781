"""The Trainer of transformers: the precision is not in TrainingArguments. It is in mp.yaml.

mpguard launch --config examples/mp_trainer.yaml examples/train_trainer.py --steps 20
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from gpt import GPT, Windows, corpus, loss_of
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    """A model as the Trainer needs it: named inputs, and the loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gpt(input_ids)
        return {"loss": loss_of(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            learning_rate=1e-3,
            per_device_train_batch_size=16,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model=Model(), args=arguments, train_dataset=Windows(corpus())).train()


if __name__ == "__main__":
    main()
