import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank
        self.org_forward = base.forward
        base.forward = self.forward

    def forward(self, x):
        return self.org_forward(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype) * self.scale


class LoRANetwork(nn.Module):
    def __init__(self, model, rank=16, alpha=16):
        super().__init__()
        self.loras = nn.ModuleDict()
        for name, mod in list(model.named_modules()):
            if isinstance(mod, nn.Linear) and ("qkv" in name or "proj" in name):
                self.loras[name.replace(".", "_")] = LoRALinear(mod, rank, alpha)

    def state_dict_fp16(self):
        return {k: v.detach().half().cpu().contiguous() for k, v in self.state_dict().items()}
