import torch.nn.functional as F
from torch import nn


def l1_relative(reconstructed, real, mask):
    batch = real.size(0)
    area = mask.view(batch, -1).sum(dim=1).clamp(min=1)
    diff = (reconstructed * mask - real * mask).abs().view(batch, -1).sum(dim=1)
    return (diff / (3 * area)).mean()


class Losses(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.masked_l1_loss, self.mask_loss = l1_relative, nn.BCELoss()
        self.l1_loss = nn.L1Loss()

    def forward(self, pred_ims, target, pred_ms, mask):
        pixel_loss = self.masked_l1_loss(pred_ims[0], target, mask)
        pixel_loss = pixel_loss + self.l1_loss(pred_ims[0] * pred_ms[0], target * mask)
        pred_ms = [F.interpolate(m, size=mask.shape[2:], mode="bilinear", align_corners=False) for m in pred_ms]
        pred_ms = [m.clamp(0, 1) for m in pred_ms]
        final_mask_loss = self.mask_loss(pred_ms[0], mask)
        primary_loss = sum(self.mask_loss(m, mask) for m in pred_ms[1:])
        return pixel_loss, final_mask_loss + self.args.lambda_primary * primary_loss
