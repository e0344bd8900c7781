"""A GradScaler and OneCycleLR: the schedule advances at steps that the scaler skips, too."""

import torch
from torch import nn

torch.manual_seed(1234)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=5e-5, eps=1e-8)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-5, 108, pct_start=0.05, cycle_momentum=False)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**25)
for _ in range(8):
    optimizer.zero_grad()
    image, flow = torch.rand(4, 3, 16, 16) * 255, torch.randn(4, 2, 16, 16) * 50
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(2 * (image / 255.0) - 1.0)
    loss = (pred.float() - flow).abs().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scheduler.step()
    scaler.update()
print(f"scale {scaler.get_scale()}, steps of the schedule {scheduler.last_epoch}")
