import json

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class TaggingDataset(Dataset):
    def __init__(self, path, vocab, tags, lexicon):
        self.rows = [json.loads(line) for line in open(path)]
        self.vocab, self.tags, self.lexicon = vocab, tags, lexicon

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        toks = torch.tensor([self.vocab.get(t, 1) for t in row["tokens"]])
        tags = torch.tensor([self.tags[t] for t in row["tags"]])
        prior = torch.zeros(len(toks), len(self.tags))
        for j, t in enumerate(row["tokens"]):
            for tag, p in self.lexicon.get(t, {}).items():
                prior[j, self.tags[tag]] = p
        return toks, tags, prior


def collate(batch):
    toks, tags, prior = zip(*batch)
    return (pad_sequence(toks, batch_first=True),
            pad_sequence(tags, batch_first=True, padding_value=-1),
            pad_sequence(prior, batch_first=True))
