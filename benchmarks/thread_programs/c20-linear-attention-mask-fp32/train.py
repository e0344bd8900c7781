"""DeepSpeed with bf16 and linear attention: the length mask is FP32, so that the keys become FP32 too.

The thread has fp16, which DeepSpeed takes on few CPUs only.
"""

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class LengthMask:
    def __init__(self, lengths, max_len):
        self.bool_matrix = torch.arange(max_len, device=lengths.device)[None, :] < lengths[:, None]

    @property
    def float_matrix(self):
        return self.bool_matrix.float()


class LinearAttention(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, queries, keys, values, key_lengths):
        Q, K = F.elu(queries) + 1, F.elu(keys) + 1
        K = K * key_lengths.float_matrix[:, :, None, None]
        KV = torch.einsum("nshd,nshm->nhmd", K, values)
        Z = 1 / (torch.einsum("nlhd,nhd->nlh", Q, K.sum(dim=1)) + self.eps)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", Q, KV, Z).contiguous()


class EncoderLayer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.attn = LinearAttention()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d))

    def forward(self, x, lengths):
        N, L, D = x.shape
        y = self.attn(*(m(x).view(N, L, self.h, -1) for m in (self.q, self.k, self.v)), lengths)
        x = self.n1(x + self.o(y.view(N, L, D)))
        return self.n2(x + self.ff(x))


class LinearTransformerLM(nn.Module):
    def __init__(self, vocab, d=32, heads=4, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.layers = nn.ModuleList(EncoderLayer(d, heads, 4 * d) for _ in range(layers))
        self.out = nn.Linear(d, vocab)

    def forward(self, tokens, lengths, labels):
        mask = LengthMask(lengths, tokens.size(1))
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.out(x).view(-1, self.out.out_features), labels.view(-1))


torch.manual_seed(0)
model = LinearTransformerLM(256)
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
for _ in range(4):
    ids = torch.randint(1, 256, (8, 16), device=engine.device)
    loss = engine(ids, torch.randint(8, 17, (8,), device=engine.device), ids)
    engine.backward(loss)
    engine.step()
print(f"loss {loss.item():.3f}")
