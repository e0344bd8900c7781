import torch
import torch.nn as nn
import torch.nn.functional as F


def dice_loss(pred, target, n):
    inter = 2 * (pred * target).flatten(1).sum(1)
    den = pred.pow(2).flatten(1).sum(1) + target.pow(2).flatten(1).sum(1)
    return (1 - (inter + 1) / (den + 1)).sum() / max(n, 1)


def mask_loss(logits, logits_uncertain, logits_refined, gt_masks, gt_uncertain):
    coarse = F.binary_cross_entropy_with_logits(logits, gt_masks)
    refined = F.binary_cross_entropy_with_logits(logits_refined, gt_masks)
    pred_uncertain = logits_uncertain.sigmoid()
    unc = dice_loss(pred_uncertain, gt_uncertain, pred_uncertain.shape[0]) + F.binary_cross_entropy(
        pred_uncertain, gt_uncertain, reduction="mean")
    return {"loss_mask": coarse, "loss_mask_uncertain": 0.5 * unc, "loss_mask_refine": refined}


class RefineMaskHead(nn.Module):
    def __init__(self, in_ch=256, dim=256, layers=3):
        super().__init__()
        self.convs = nn.Sequential(*[m for _ in range(4) for m in
                                     (nn.Conv2d(in_ch if _ == 0 else dim, dim, 3, padding=1), nn.ReLU())])
        self.up = nn.ConvTranspose2d(dim, dim, 2, 2)
        self.predictor, self.uncertain = nn.Conv2d(dim, 1, 1), nn.Conv2d(dim, 1, 1)
        enc = nn.TransformerEncoderLayer(dim, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(enc, layers)
        self.point = nn.Linear(dim, 1)

    def forward(self, x):
        f = F.relu(self.up(self.convs(x)))
        logits, unc = self.predictor(f), self.uncertain(f)
        b, c, h, w = f.shape
        seq = f.flatten(2).transpose(1, 2)
        idx = unc.flatten(1).topk(100, dim=1).indices
        pts = self.encoder(seq.gather(1, idx[..., None].expand(-1, -1, c)))
        refined = logits.flatten(1).float().scatter(1, idx, self.point(pts).squeeze(-1).float()).view(b, 1, h, w)
        return logits, unc, refined
