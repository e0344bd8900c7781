import torch
from torch.utils.data import Dataset


class DocRED(Dataset):
    def __init__(self, path):
        self.docs = torch.load(path)

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.docs[i]


def collate(docs):
    keys = ["input_ids", "attention_mask", "mention_pos", "head_idx", "tail_idx", "path_idx", "path_mask"]
    batch = {k: torch.stack([d[k] for d in docs]) for k in keys}
    return batch, torch.stack([d["labels"] for d in docs]).float(), torch.stack([d["pair_mask"] for d in docs])
