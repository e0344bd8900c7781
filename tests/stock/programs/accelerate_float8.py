"""Train with accelerate's FP8 on torchao and its defaults, and print which weights changed. Sets no all-gather."""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)


def weights() -> dict[str, torch.Tensor]:
    found = {name: getattr(each, "_tensor", each) for name, each in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


before = weights()
losses = []
for _ in range(3):
    loss = model(torch.ones(16, 16)).float().pow(2).mean()
    losses.append(loss.item())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
after = weights()
unchanged = sorted(name for name in before if torch.equal(before[name], after[name]))
kinds = {name: type(module).__name__ for name, module in model.named_children()}
sys.stdout.write(json.dumps({"rank": 0, "unchanged": unchanged, "kinds": kinds, "losses": losses}) + "\n")
