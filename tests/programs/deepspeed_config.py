"""Train with `deepspeed.initialize` and each config that is given as JSON: `deepspeed_config.py CONFIG ...`.

Print the optimizer class that DeepSpeed has built, and the losses. A config with `"conv": true` trains a convolution,
whose weight has three dimensions, as well. Muon updates the weights, and Adam the biases.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch


def train(config: dict[str, Any]) -> None:
    conv = config.pop("conv", False)
    torch.manual_seed(0)
    layers = [torch.nn.Conv1d(1, 1, 3, padding=1)] if conv else []
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), *layers, torch.nn.Linear(256, 64))
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim > 1  # type: ignore[attr-defined]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, **config}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype, losses = next(model.parameters()).dtype, []
    for step in range(3):
        x = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(step))
        loss = (engine(x.to(dtype)).float() - x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(json.dumps({"rank": 0, "class": type(engine.optimizer).__name__, "losses": losses}))


deepspeed.init_distributed("gloo")
for text in sys.argv[1:]:
    train(json.loads(text))
