import torch
import torch.nn.functional as F


def sequence_loss(preds, gt, valid, gamma=0.8):
    n = len(preds)
    return sum(gamma ** (n - i - 1) * ((p - gt).abs().mean(-1) * valid).sum() / valid.sum().clamp(min=1)
               for i, p in enumerate(preds)) / n


def balanced_ce_loss(logit, gt):
    l = F.binary_cross_entropy_with_logits(logit, gt.float(), reduction="none")
    pos, neg = gt > 0.5, gt <= 0.5
    return 0.5 * (l[pos].mean() if pos.any() else 0.0) + 0.5 * (l[neg].mean() if neg.any() else 0.0)
