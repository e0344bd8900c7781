import open_clip
import torch
import torch.nn.functional as F
from torch import nn


class CLIPRetriever(nn.Module):
    def __init__(self, name="ViT-B-32", pretrained="laion2b_s34b_b79k", dim=256):
        super().__init__()
        self.clip, _, self.preprocess = open_clip.create_model_and_transforms(name, pretrained=pretrained, precision="fp32")
        width = self.clip.text_projection.shape[1]
        self.img_proj, self.txt_proj = nn.Linear(width, dim), nn.Linear(width, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images, tokens):
        i = F.normalize(self.img_proj(self.clip.encode_image(images)), dim=-1)
        t = F.normalize(self.txt_proj(self.clip.encode_text(tokens)), dim=-1)
        logits = self.logit_scale.exp() * i @ t.T
        y = torch.arange(len(i), device=i.device)
        return (F.cross_entropy(logits.float(), y) + F.cross_entropy(logits.T.float(), y)) / 2
