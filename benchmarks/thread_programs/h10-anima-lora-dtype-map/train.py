"""LoRA in a loop of its own: the dtype of fp16 is not in the map, so it trains in FP32 and without a GradScaler."""

import torch
import torch.nn.functional as F
from torch import nn

args = {"mixed_precision": "fp16"}
dtype = torch.bfloat16 if args["mixed_precision"] == "bf16" else torch.float32


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.org_forward = base.forward
        base.forward = self.forward

    def forward(self, x):
        return self.org_forward(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
model.requires_grad_(False)
model.to(dtype=dtype)
loras = nn.ModuleList(LoRALinear(module, 8) for module in model if isinstance(module, nn.Linear))
optimizer = torch.optim.AdamW(loras.parameters(), lr=1e-4)
for _ in range(4):
    latents = torch.randn(16, 64).to(dtype)
    noise = torch.randn_like(latents)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        pred = model(latents + noise)
    loss = F.mse_loss(pred.float(), (noise - latents).float())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(loras.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"loss {loss.item():.3f}")
