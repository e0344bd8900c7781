import torch
import torch.nn as nn
import transformer_engine.pytorch as te


class TextCNNEmbedder(nn.Module):
    def __init__(self, vocab, dim=178, widths=(2, 3, 4, 5)):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, w, padding=w // 2) for w in widths)
        self.out_dim = dim * len(widths)

    def forward(self, x):
        e = self.emb(x).transpose(1, 2)
        return torch.cat([c(e).amax(-1) for c in self.convs], dim=-1)


class Classifier(nn.Module):
    def __init__(self, vocab, n_classes, hidden=896):
        super().__init__()
        self.embed = TextCNNEmbedder(vocab)
        self.fc1 = te.Linear(self.embed.out_dim, hidden)
        self.fc2 = te.Linear(hidden, 4096)
        self.fc3 = te.Linear(4096, 4096)
        self.head = nn.Linear(4096, n_classes)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x):
        h = self.drop(self.act(self.fc1(self.embed(x))))
        h = self.drop(self.act(self.fc2(h)))
        return self.head(self.act(self.fc3(h)))
