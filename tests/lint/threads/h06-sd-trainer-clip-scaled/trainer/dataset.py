import os
import random

from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class CaptionedImages(Dataset):
    def __init__(self, root, tokenizer, size=512, ucg=0.1):
        self.root = root
        self.tokenizer = tokenizer
        self.ucg = ucg
        self.stems = sorted({os.path.splitext(f)[0] for f in os.listdir(root) if f.endswith(".txt")})
        self.tf = transforms.Compose([
            transforms.Resize(size), transforms.RandomCrop(size), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize([0.5], [0.5]),
        ])

    def __len__(self):
        return len(self.stems)

    def __getitem__(self, i):
        stem = os.path.join(self.root, self.stems[i])
        image = Image.open(stem + ".png").convert("RGB")
        caption = "" if random.random() < self.ucg else open(stem + ".txt").read().strip()
        ids = self.tokenizer(
            caption, padding="max_length", truncation=True, max_length=self.tokenizer.model_max_length,
            return_tensors="pt",
        ).input_ids[0]
        return {"pixel_values": self.tf(image), "input_ids": ids}
