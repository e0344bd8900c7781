"""DDP with a GradScaler: a step whose gradient norm is too large is skipped, and `scaler.update()` with it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
trunk = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), trunk, nn.Linear(32, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
grad_clip_norm = 1.0
for step in range(8):
    x, y = torch.randn(4, 8, 16), torch.randn(4, 8, 8)
    if step == 3:
        y = y * 100
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    skip_optimizer_step = False
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip_norm).item()
    if norm > 5 * grad_clip_norm:
        skip_optimizer_step = True
        print(f"WARNING: step {step} grad norm too large {norm}, skipping optimizer step")
    if not skip_optimizer_step:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
