import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoModel


class PathReasoner(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.query = nn.Linear(2 * hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)

    def forward(self, pair, paths, path_mask):
        q = self.query(pair).unsqueeze(2)
        k = self.key(paths)
        scores = self.score(torch.tanh(q + k))
        scores_mask = scores.masked_fill(~path_mask.unsqueeze(-1), -1e9)
        att = F.softmax(scores_mask, dim=2)
        return (att * paths).sum(dim=2)


class MPR(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(config.pretrained)
        h = self.encoder.config.hidden_size
        self.reasoner = PathReasoner(h)
        self.classifier = nn.Sequential(nn.Linear(3 * h, h), nn.ReLU(), nn.Dropout(0.2), nn.Linear(h, config.num_relations))

    def pool(self, hidden, pos):
        return torch.einsum("bnl,blh->bnh", pos, hidden)

    def forward(self, input_ids, attention_mask, mention_pos, head_idx, tail_idx, path_idx, path_mask):
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        ent = self.pool(hidden, mention_pos.to(hidden.dtype))
        b = torch.arange(ent.shape[0], device=ent.device)[:, None]
        pair = torch.cat([ent[b, head_idx], ent[b, tail_idx]], dim=-1)
        paths = ent[b[..., None], path_idx]
        reason = self.reasoner(pair, paths, path_mask)
        return self.classifier(torch.cat([pair, reason], dim=-1))
