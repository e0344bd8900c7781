import torch
import torch.nn.functional as F
from torch import nn

from .paligemma_with_expert import PrefixSuffixModel


class PI0Policy(nn.Module):
    def __init__(self, state_dim=14, action_dim=14, chunk=50, dim=512, vocab=32000):
        super().__init__()
        self.chunk, self.action_dim = chunk, action_dim
        self.patch = nn.Conv2d(3, dim, 16, 16)
        self.lang = nn.Embedding(vocab, dim)
        self.state_proj = nn.Linear(state_dim, dim)
        self.action_in, self.action_out = nn.Linear(action_dim + 1, dim), nn.Linear(dim, action_dim)
        self.model = PrefixSuffixModel(dim)

    def forward(self, batch):
        actions = batch["action"]
        b = actions.shape[0]
        t = torch.rand(b, 1, 1, device=actions.device)
        noise = torch.randn_like(actions)
        x_t = t * noise + (1 - t) * actions
        img = self.patch(batch["image"]).flatten(2).transpose(1, 2)
        lang = self.lang(batch["lang_tokens"])
        state = self.state_proj(batch["state"])[:, None]
        act = self.action_in(torch.cat([x_t, t.expand(-1, self.chunk, -1)], dim=-1))
        embs = torch.cat([img, lang, state, act], dim=1)
        pad = torch.ones(b, embs.shape[1], device=embs.device, dtype=torch.long)
        pad[:, img.shape[1]:img.shape[1] + lang.shape[1]] = batch["lang_masks"].long()
        att = torch.zeros_like(pad)
        att[:, img.shape[1] + lang.shape[1]] = 1
        att[:, -self.chunk] = 1
        v_t = self.action_out(self.model(embs, pad, att)[:, -self.chunk:])
        return F.mse_loss(v_t, noise - actions)
