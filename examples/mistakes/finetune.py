"""Scales the loss, and then bypasses the scaler with `optimizer.step()`."""

import torch


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        optimizer.step()
        scaler.update()
