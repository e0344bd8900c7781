import numpy as np
import tensorflow_datasets as tfds
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset


class RLDSWrapper(IterableDataset):
    def __init__(self, root, name, processor):
        self.ds = tfds.load(name, data_dir=str(root), split="train").repeat()
        self.p = processor
        self.bins = np.linspace(-1, 1, 256)

    def __iter__(self):
        tok = self.p.tokenizer
        for ep in self.ds:
            for s in tfds.as_numpy(ep["steps"]):
                a = np.clip(s["action"], -1, 1)
                act = tok.decode(list(tok.vocab_size - np.digitize(a, self.bins)))
                lang = s["language_instruction"].decode()
                text = f"In: What action should the robot take to {lang}?\nOut: {act}</s>"
                ids = torch.tensor(tok(text).input_ids)
                lab = ids.clone()
                lab[: -(len(a) + 1)] = -100
                img = self.p.image_processor(Image.fromarray(s["observation"]["image"]), return_tensors="pt")
                yield {"input_ids": ids, "labels": lab, "pixel_values": img["pixel_values"][0]}


class PaddedCollator:
    def __init__(self, pad):
        self.pad = pad

    def __call__(self, b):
        ids = pad_sequence([x["input_ids"] for x in b], True, self.pad)
        return {"input_ids": ids, "attention_mask": ids.ne(self.pad),
                "labels": pad_sequence([x["labels"] for x in b], True, -100),
                "pixel_values": torch.stack([x["pixel_values"] for x in b])}
