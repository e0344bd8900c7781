"""Trains with trackers of accelerate: its own, one that fails, and those that are named; prints what its own got.

python watch_trackers.py [tensorboard] [wandb]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import mpguard


class Own(GeneralTracker):  # type: ignore[misc]  # accelerate has no types
    name, requires_logging_directory = "own", False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    @property
    def tracker(self) -> Any:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **_more: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = len(self.logged)


class Broken(Own):
    name = "broken"

    def log(self, values: dict[str, Any], step: int | None = None, **_more: Any) -> None:
        if "mpguard/ms" in values:
            raise OSError("the disk is full")


own = Own()
installed = [(name, {"mode": "offline", "dir": "."} if name == "wandb" else {}) for name in sys.argv[1:]]
accelerator = Accelerator(cpu=True, log_with=[Broken(), own, *(name for name, _ in installed)], project_dir=".")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
mpguard.watch(jsonl="run.jsonl")
accelerator.init_trackers("watched", init_kwargs=dict(installed))
for step in range(1, 31):
    loss = model(torch.randn(4, 16)).square().mean()
    accelerator.backward(loss * float("nan") if step == 30 else loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=step)
accelerator.end_training()
mpguard.watch(level="off")
watched = [(step, values) for step, values in own.logged if "loss" not in values]
print(json.dumps({"rank": 0, "watched": watched, "finished": own.finished == len(own.logged)}))
