"""Gradients are accumulated over some batches, unscaled once, clipped, and applied."""

import torch


def train(model, loader, criterion, iters_to_accumulate=4, max_norm=1.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler()
    for i, (x, y) in enumerate(loader):
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = criterion(model(x), y) / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
