"""FP8 by Transformer Engine: its modules, its autocast, and backward outside of it."""

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")


class MLP(torch.nn.Module):
    def __init__(self, hidden=768, ffn=3072):
        super().__init__()
        self.norm = te.LayerNorm(hidden)
        self.linear1 = te.Linear(hidden, ffn, bias=True)
        self.linear2 = te.Linear(ffn, hidden, bias=True)

    def forward(self, x):
        x = self.linear1(self.norm(x))
        x = torch.nn.functional.gelu(x, approximate="tanh")
        return self.linear2(x)


def train(loader):
    model = MLP().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, target in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16), te.autocast(enabled=True, recipe=recipe):
            out = model(x)
        loss = torch.nn.functional.mse_loss(out.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
