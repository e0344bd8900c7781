"""A loop that scales the loss with a GradScaler, and steps past it: the gradients stay 1024 times as large."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(42)
device = "cpu"
proposal_network = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
prop_optimizer = torch.optim.Adam(proposal_network.parameters(), lr=1e-2, eps=1e-15, weight_decay=1e-6)
grad_scaler = torch.amp.GradScaler(device, 2**10)
radiance_field = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
optimizer = torch.optim.Adam(radiance_field.parameters(), lr=1e-2, eps=1e-15, weight_decay=1e-6)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], 0.33)

for _ in range(4):
    rays, pixels = torch.rand(64, 3, device=device), torch.rand(64, 3, device=device)
    with torch.autocast(device, dtype=torch.float16):  # in the thread: fields of tiny-cuda-nn, which compute in FP16
        weights = torch.sigmoid(proposal_network(rays))
        rgb = torch.sigmoid(radiance_field(rays)) * weights.detach()
    prop_loss = F.mse_loss(weights.float(), torch.ones_like(weights, dtype=torch.float32))
    prop_optimizer.zero_grad()
    prop_loss.backward()
    prop_optimizer.step()

    loss = F.smooth_l1_loss(rgb.float(), pixels)
    optimizer.zero_grad()
    grad_scaler.scale(loss).backward()
    optimizer.step()
    scheduler.step()
print(f"loss {loss.item():.3f}")
