"""accelerate in fp16 with an accumulation loop of its own: it clips, and so unscales, after each micro-batch."""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(1)
accelerator = Accelerator(mixed_precision="fp16")
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optim = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.01)
dl = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=4)
model, optim, dl = accelerator.prepare(model, optim, dl)
dl_iter = iter(dl)
for _ in range(4):
    for _ in range(4):
        videos = next(dl_iter)
        with accelerator.autocast():
            loss = nn.functional.mse_loss(model(videos).float(), videos)
        accelerator.backward(loss / 4)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
accelerator.print("training complete")
