import pandas as pd
import pytorch_lightning as pl
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Text2SemanticDataModule(pl.LightningDataModule):
    def __init__(self, config, train_semantic_path, train_phoneme_path):
        super().__init__()
        self.cfg = config
        sem = pd.read_csv(train_semantic_path, sep="\t", names=["name", "sem"])
        ph = pd.read_csv(train_phoneme_path, sep="\t", names=["name", "ph"])
        self.rows = sem.merge(ph, on="name")[["ph", "sem"]].values.tolist()

    def train_dataloader(self):
        ids = lambda s: torch.tensor([int(t) for t in s.split()])
        pad = lambda xs, v: pad_sequence(xs, True, v)
        return DataLoader(self.rows, self.cfg["train"]["batch_size"], shuffle=True, num_workers=4,
                          collate_fn=lambda b: {"phoneme_ids": pad([ids(r[0]) for r in b], 0),
                                                "semantic_ids": pad([ids(r[1]) for r in b], self.cfg["model"]["EOS"])})
