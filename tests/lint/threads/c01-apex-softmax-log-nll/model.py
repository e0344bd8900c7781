import torch
import torch.nn as nn
import torch.nn.functional as F


class BiLSTMTagger(nn.Module):
    def __init__(self, vocab_size, num_tags, emb_dim=256, hidden=512, dropout=0.3):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, emb_dim, padding_idx=0)
        self.encoder = nn.LSTM(emb_dim, hidden // 2, num_layers=2, batch_first=True,
                               bidirectional=True, dropout=dropout)
        self.copy_gate = nn.Linear(hidden, 1)
        self.out = nn.Linear(hidden, num_tags)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens, prior):
        h, _ = self.encoder(self.drop(self.embed(tokens)))
        gate = torch.sigmoid(self.copy_gate(h))
        probs = F.softmax(self.out(self.drop(h)), dim=-1)
        return gate * probs + (1 - gate) * prior.to(probs.dtype)


class MixtureNLLLoss(nn.Module):
    def __init__(self, ignore_index=-1):
        super().__init__()
        self.nll = nn.NLLLoss(ignore_index=ignore_index)

    def forward(self, probs, target):
        log_probs = torch.log(probs)
        return self.nll(log_probs.view(-1, log_probs.size(-1)), target.view(-1))
