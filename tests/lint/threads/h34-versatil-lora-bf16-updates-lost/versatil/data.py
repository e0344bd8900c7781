import glob
import os

import h5py
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class LiberoSteps(Dataset):
    def __init__(self, root, processor, bins=256):
        self.index = []
        for path in sorted(glob.glob(os.path.join(root, "*.hdf5"))):
            with h5py.File(path) as f:
                for demo in f["data"]:
                    n = len(f["data"][demo]["actions"])
                    self.index += [(path, demo, t) for t in range(n)]
        self.proc = processor
        self.bins = np.linspace(-1, 1, bins)

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        path, demo, t = self.index[i]
        with h5py.File(path) as f:
            g = f["data"][demo]
            image = Image.fromarray(g["obs"]["agentview_rgb"][t][::-1])
            action = np.clip(g["actions"][t], -1, 1)
            task = f["data"].attrs.get("language", "do the task")
        enc = self.proc(f"In: What action should the robot take to {task}?\nOut:", image)
        toks = self.proc.tokenizer.vocab_size - np.digitize(action, self.bins)
        ids = torch.cat([enc["input_ids"][0], torch.as_tensor(toks)])
        labels = ids.clone()
        labels[: -len(toks)] = -100
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
            "pixel_values": enc["pixel_values"][0],
        }


def make_loader(root, processor, batch_size, workers):
    def collate(rows):
        n = max(len(r["input_ids"]) for r in rows)
        out = {k: [] for k in rows[0]}
        for r in rows:
            pad = n - len(r["input_ids"])
            out["input_ids"].append(torch.nn.functional.pad(r["input_ids"], (0, pad)))
            out["attention_mask"].append(torch.nn.functional.pad(r["attention_mask"], (0, pad)))
            out["labels"].append(torch.nn.functional.pad(r["labels"], (0, pad), value=-100))
            out["pixel_values"].append(r["pixel_values"])
        return {k: torch.stack(v) for k, v in out.items()}

    return DataLoader(LiberoSteps(root, processor), batch_size, shuffle=True, num_workers=workers, collate_fn=collate)
