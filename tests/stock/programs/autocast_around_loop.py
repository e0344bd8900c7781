"""Train a model in a loop that is inside of one autocast region, and with a region in each step; print both losses."""

from __future__ import annotations

import contextlib
import json
import sys

import torch


def loss_after(*, around_loop: bool) -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast if around_loop else contextlib.nullcontext():
        for _ in range(8):
            with contextlib.nullcontext() if around_loop else autocast:
                loss = (model(x).float() - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


facts = {"around_loop": loss_after(around_loop=True), "in_each_step": loss_after(around_loop=False)}
sys.stdout.write(json.dumps({"rank": 0, **facts}) + "\n")
