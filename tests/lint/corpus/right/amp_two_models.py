"""Two models, two losses, two optimizers, one scaler: one update after both steps."""

import torch


def train(generator, critic, loader, loss_fn):
    optimizer0 = torch.optim.Adam(generator.parameters(), lr=2e-4)
    optimizer1 = torch.optim.Adam(critic.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, target in loader:
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output0 = generator(x)
            output1 = critic(x)
            loss0 = loss_fn(2 * output0 + 3 * output1, target)
            loss1 = loss_fn(3 * output0 - 5 * output1, target)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
