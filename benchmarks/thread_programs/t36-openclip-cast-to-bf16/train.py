"""open_clip's model in fp32, whose layers the script casts to bf16 one by one: its bare parameters stay FP32."""

import open_clip
import torch
import torch.nn.functional as F
from torch import nn

open_clip.add_model_config("tiny.json")


class CLIPRetriever(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.clip, _, _ = open_clip.create_model_and_transforms("tiny", precision="fp32")
        width = self.clip.text_projection.shape[1]
        self.img_proj, self.txt_proj = nn.Linear(width, dim), nn.Linear(width, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images, tokens):
        i = F.normalize(self.img_proj(self.clip.encode_image(images)), dim=-1)
        t = F.normalize(self.txt_proj(self.clip.encode_text(tokens)), dim=-1)
        logits = self.logit_scale.exp() * i @ t.T
        y = torch.arange(len(i), device=i.device)
        return (F.cross_entropy(logits.float(), y) + F.cross_entropy(logits.T.float(), y)) / 2


def cast_model(model, dtype):
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.MultiheadAttention)):
            module.to(dtype)
    return model


torch.manual_seed(0)
dtype = torch.bfloat16
model = cast_model(CLIPRetriever(), dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.2, betas=(0.9, 0.98), eps=1e-6)
for _ in range(4):
    images, tokens = torch.randn(8, 3, 32, 32).to(dtype), torch.randint(1, 256, (8, 16))
    loss = model(images, tokens)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(f"loss {loss.item():.3f}")
