"""Fabric with 16-mixed: `loss.backward()` in place of `fabric.backward(loss)`."""

import lightning as L
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

# Fabric takes "16-mixed" on a GPU only; its plugin runs on a CPU too.
precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[precision])
fabric.launch()
fabric.seed_everything(1337)
with fabric.init_module(empty_init=False):
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.02))
for iter_num in range(1, 9):
    tokens = torch.randint(64, (4, 16), device=fabric.device)
    is_accumulating = iter_num % 2 != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[..., :-1, :].flatten(0, 1), tokens[..., 1:].flatten())
        (loss / 2).backward()
    if not is_accumulating:
        optimizer.step()
        optimizer.zero_grad()
fabric.print(f"loss {loss.item():.3f}")
