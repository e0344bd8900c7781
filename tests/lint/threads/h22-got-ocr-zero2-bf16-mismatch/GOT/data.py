import json
import os

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class OCRConversations(Dataset):
    def __init__(self, tokenizer, root, name, max_len, image_token_len):
        with open(os.path.join(root, name + ".json")) as f:
            self.items = json.load(f)
        self.root, self.tok, self.max_len = root, tokenizer, max_len
        self.prefix = "<img>" + "<imgpad>" * image_token_len + "</img>\nOCR: "
        self.tf = transforms.Compose([transforms.Resize((1024, 1024)), transforms.ToTensor()])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        it = self.items[i]
        src = self.tok(self.prefix).input_ids
        tgt = self.tok(it["text"] + self.tok.eos_token).input_ids
        ids = (src + tgt)[: self.max_len]
        labels = ([-100] * len(src) + tgt)[: self.max_len]
        image = self.tf(Image.open(os.path.join(self.root, it["image"])).convert("RGB"))
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "images": image}


class Collate:
    def __init__(self, pad):
        self.pad = pad

    def __call__(self, rows):
        pad_seq = torch.nn.utils.rnn.pad_sequence
        ids = pad_seq([r["input_ids"] for r in rows], True, self.pad)
        labels = pad_seq([r["labels"] for r in rows], True, -100)
        return {
            "input_ids": ids, "labels": labels, "attention_mask": ids.ne(self.pad),
            "images": torch.stack([r["images"] for r in rows]),
        }


def make_data_module(tokenizer, data_args, max_len):
    ds = OCRConversations(tokenizer, data_args.data_root, data_args.datasets, max_len, data_args.image_token_len)
    return {"train_dataset": ds, "eval_dataset": None, "data_collator": Collate(tokenizer.pad_token_id or 0)}
