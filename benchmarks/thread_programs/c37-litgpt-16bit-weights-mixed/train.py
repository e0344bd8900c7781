"""Fabric with bf16-mixed: a checkpoint in bf16 becomes the parameters (assign=True), without master weights."""

import lightning as L
import torch
from torch import nn


def gpt():
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))


torch.save(gpt().to(torch.bfloat16).state_dict(), "lit_model.pth")
fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(1337)
with torch.device("meta"):
    model = gpt()
state = torch.load("lit_model.pth", mmap=True, map_location="cpu")
model.load_state_dict(state, assign=True)
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02))
for iter_num in range(1, 9):
    tokens = torch.randint(64, (4, 16), device=fabric.device)
    is_accumulating = iter_num % 2 != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss / 2)
    if not is_accumulating:
        optimizer.step()
        optimizer.zero_grad()
fabric.print(f"loss {loss.item():.3f}")
