"""A loop with autocast around all of the training: the bf16 copies of the weights that it caches become stale."""

import torch
from torch import nn

torch.manual_seed(0)
ids = torch.randint(0, 64, (4096,))
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = nn.CrossEntropyLoss()


def train_epoch():
    model.train()
    for _ in range(8):
        x = ids[:256].view(8, 32)
        loss = loss_fn(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss


def fit():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for epoch in range(2):
            print(f"epoch {epoch} loss {train_epoch().item():.3f}")


fit()
