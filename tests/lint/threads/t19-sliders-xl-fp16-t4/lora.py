import math

import torch
from torch import nn


class LoRAModule(nn.Module):
    def __init__(self, org, rank, alpha):
        super().__init__()
        self.down = nn.Linear(org.in_features, rank, bias=False)
        self.up = nn.Linear(rank, org.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)
        self.scale, self.multiplier = alpha / rank, 0.0
        self.org_forward = org.forward
        org.forward = self.forward

    def forward(self, x):
        return self.org_forward(x) + self.up(self.down(x)) * self.multiplier * self.scale


class LoRANetwork(nn.Module):
    def __init__(self, unet, rank=4, alpha=1.0, train_method="noxattn"):
        super().__init__()
        self.loras = nn.ModuleList()
        for name, m in unet.named_modules():
            if isinstance(m, nn.Linear) and "transformer_blocks" in name:
                if train_method == "noxattn" and "attn2" in name:
                    continue
                self.loras.append(LoRAModule(m, rank, alpha))

    def prepare_optimizer_params(self):
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def save_weights(self, file, dtype=None):
        torch.save({k: v.detach().cpu().to(dtype or v.dtype) for k, v in self.state_dict().items()}, file)

    def __enter__(self):
        for lora in self.loras:
            lora.multiplier = 1.0

    def __exit__(self, *exc):
        for lora in self.loras:
            lora.multiplier = 0.0
