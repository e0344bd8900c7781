import os

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class CaptionFolder(Dataset):
    def __init__(self, root, tokenizer, resolution):
        self.items = [os.path.join(root, f) for f in os.listdir(root) if f.lower().endswith((".png", ".jpg", ".webp"))]
        self.tokenizer = tokenizer
        self.tf = transforms.Compose([transforms.Resize(resolution), transforms.CenterCrop(resolution),
                                      transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        caption = os.path.splitext(os.path.basename(self.items[i]))[0].split("_")[0]
        ids = self.tokenizer(caption, truncation=True, padding="max_length",
                             max_length=self.tokenizer.model_max_length, return_tensors="pt").input_ids[0]
        return {"image": self.tf(Image.open(self.items[i]).convert("RGB")), "tokens": ids}
