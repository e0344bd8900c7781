"""A function with its own backward, used under autocast."""

import torch
from torch.amp import custom_bwd, custom_fwd


class MatMul(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


def train(a, b, optimizer, scaler):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = MatMul.apply(a, b).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
