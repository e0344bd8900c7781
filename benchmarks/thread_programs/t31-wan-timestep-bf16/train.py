"""A diffusion transformer in bf16: the timestep is cast to bf16 before its sinusoidal embedding."""

import torch
from torch import nn


def sinusoidal_embedding_1d(dim, position):
    steps = torch.arange(dim // 2, dtype=torch.float64, device=position.device).div(dim // 2)
    sinusoid = torch.outer(position.type(torch.float64), torch.pow(10000, -steps))
    return torch.cat([torch.cos(sinusoid), torch.sin(sinusoid)], dim=1).to(position.dtype)


class WanModel(nn.Module):
    def __init__(self, dim=32, in_dim=16, freq_dim=16):
        super().__init__()
        self.freq_dim = freq_dim
        self.patch_embedding, self.head = nn.Linear(in_dim, dim), nn.Linear(dim, in_dim)
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x, timestep):
        t = self.time_embedding(sinusoidal_embedding_1d(self.freq_dim, timestep))
        return self.head(self.block(self.patch_embedding(x) + t[:, None]))


torch.manual_seed(0)
torch_dtype = torch.bfloat16
sigmas = torch.linspace(1.0, 0.003, 1000)
dit = WanModel().to(dtype=torch_dtype)
opt = torch.optim.AdamW(dit.parameters(), lr=1e-5, weight_decay=0.01)
for _ in range(4):
    latents = torch.randn(2, 8, 16).to(torch_dtype)
    sigma = sigmas[torch.randint(0, 1000, (1,))]
    timestep = (sigma * 1000).to(dtype=torch_dtype)
    noise = torch.randn_like(latents)
    noisy = (1 - sigma).to(latents) * latents + sigma.to(latents) * noise
    pred = dit(noisy, timestep.expand(latents.shape[0]))
    loss = nn.functional.mse_loss(pred.float(), (noise - latents).float())
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
print(f"loss {loss.item():.3f}")
