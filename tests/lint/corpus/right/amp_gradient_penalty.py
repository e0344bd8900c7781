"""A gradient penalty: the gradients of the scaled loss are unscaled by hand before they are used."""

import torch


def train(model, optimizer, loader, loss_fn):
    scaler = torch.amp.GradScaler("cuda")
    for x, target in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = loss_fn(model(x), target)
        scaled_grads = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
        inverse_scale = 1.0 / scaler.get_scale()
        grads = [grad * inverse_scale for grad in scaled_grads]
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
            loss = loss + norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
