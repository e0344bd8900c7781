import torch
import torch.nn as nn
import torch.nn.functional as F


class LengthMask:
    def __init__(self, lengths, max_len, device):
        self.lengths = lengths.to(device)
        self.bool_matrix = torch.arange(max_len, device=device)[None, :] < self.lengths[:, None]

    @property
    def float_matrix(self):
        return self.bool_matrix.float()

    @property
    def additive_matrix(self):
        return torch.log(self.bool_matrix.float())


class LinearAttention(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, queries, keys, values, key_lengths):
        Q, K = F.elu(queries) + 1, F.elu(keys) + 1
        K = K * key_lengths.float_matrix[:, :, None, None]
        KV = torch.einsum("nshd,nshm->nhmd", K, values)
        Z = 1 / (torch.einsum("nlhd,nhd->nlh", Q, K.sum(dim=1)) + self.eps)
        V = torch.einsum("nlhd,nhmd,nlh->nlhm", Q, KV, Z)
        return V.contiguous()


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
    def __init__(self, vocab, d=512, heads=8, layers=8, max_len=4096):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d, padding_idx=0), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(EncoderLayer(d, heads, 4 * d) for _ in range(layers))
        self.out = nn.Linear(d, vocab)

    def forward(self, tokens, lengths, labels):
        mask = LengthMask(lengths, tokens.size(1), tokens.device)
        x = self.emb(tokens) + self.pos(torch.arange(tokens.size(1), device=tokens.device))
        for l in self.layers:
            x = l(x, mask)
        return F.cross_entropy(self.out(x).view(-1, self.out.out_features), labels.view(-1), ignore_index=-100)
