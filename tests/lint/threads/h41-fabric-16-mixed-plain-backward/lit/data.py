import torch


def load_split(path):
    rows = torch.load(path)
    return [r for r in rows if len(r["input_ids"]) > 1]
