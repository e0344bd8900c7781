"""Trains, prints a falling loss, and is wrong in four places. `mpguard lint examples/mistakes` finds them."""

import torch
from torch.cuda.amp import autocast
from torchao.float8 import convert_to_float8_training


def main(loader, device="cuda"):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).to(device)
    convert_to_float8_training(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for points, targets in loader:
        points = points.to(device).half()
        with autocast():
            loss = (model(points) - targets.to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
