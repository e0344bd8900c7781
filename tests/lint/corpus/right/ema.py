"""BF16 training with an average of the weights that is kept in FP32."""

import copy

import torch


def train(model, loader, decay=0.999):
    average = copy.deepcopy(model).float().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.float(), 1 - decay)
