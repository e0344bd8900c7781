import os

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class SketchPairs(Dataset):
    def __init__(self, root, tokenizer, size):
        self.root, self.tok = root, tokenizer
        self.names = sorted(os.listdir(os.path.join(root, "color")))
        self.tf = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor(),
                                      transforms.Normalize([0.5], [0.5])])

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        n = self.names[i]
        t = self.tok(open(os.path.join(self.root, "tags", n + ".txt")).read(), padding="max_length", truncation=True,
                     max_length=self.tok.model_max_length, return_tensors="pt")
        load = lambda d: self.tf(Image.open(os.path.join(self.root, d, n)).convert("RGB"))
        return {"color": load("color"), "sketch": load("sketch"), "input_ids": t.input_ids[0],
                "attention_mask": t.attention_mask[0]}
