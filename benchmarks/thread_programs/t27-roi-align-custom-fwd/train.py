"""A custom Function with custom_fwd, but without cast_inputs: its kernel gets a half feature map and FP32 rois."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def roi_align_forward(features, rois):
    """Pool as the extension of the thread does, which needs a GPU: it wants one dtype."""
    if features.dtype != rois.dtype:
        raise RuntimeError("expected scalar type Half but found Float")
    return features.mean((2, 3))[rois[:, 0].long()]


class RoIAlignFunction(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, input, rois):
        output = roi_align_forward(input, rois)
        ctx.save_for_backward(rois)
        ctx.input_shape = input.size()
        return output

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad_output):
        (rois,) = ctx.saved_tensors
        pooled = grad_output.new_zeros(ctx.input_shape[:2]).index_add(0, rois[:, 0].long(), grad_output)
        area = ctx.input_shape[2] * ctx.input_shape[3]
        return (pooled / area)[:, :, None, None].expand(ctx.input_shape), None


class FastRCNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU())
        self.head = nn.Linear(32, num_classes)

    def forward(self, x, rois):
        return self.head(RoIAlignFunction.apply(self.backbone(x), rois))


torch.manual_seed(0)
model = FastRCNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    rois = torch.cat([torch.arange(4.0)[:, None], torch.rand(4, 4) * 32], dim=1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(torch.rand(4, 3, 32, 32), rois), torch.randint(0, 10, (4,)))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.3f}")
