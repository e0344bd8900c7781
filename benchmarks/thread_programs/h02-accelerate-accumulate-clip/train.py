"""accelerate in fp16 with `accumulate`: `clip_grad_norm_`, which unscales, is called at each micro-batch."""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(42)
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=8)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch).squeeze(-1), batch.mean(1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
accelerator.print(f"loss {loss.item():.3f}")
