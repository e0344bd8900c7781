"""A subregion in FP32: its inputs come out of FP16 matrix work and are cast at its door."""

import torch
import torch.nn.functional as F


def step(model, head, x, target, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        hidden = model(x)
        with torch.autocast(device_type="cuda", enabled=False):
            probability = torch.sigmoid(head(hidden.float()))
            loss = F.binary_cross_entropy(probability, target.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()
