import csv
import os

import open_clip
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from clip_adapter import CLIPRetriever


class CaptionSet(Dataset):
    def __init__(self, path, preprocess, tokenizer):
        with open(path) as f:
            self.rows = list(csv.DictReader(f))
        self.root, self.preprocess, self.tokenizer = os.path.dirname(path), preprocess, tokenizer

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        img = Image.open(os.path.join(self.root, r["filepath"])).convert("RGB")
        return self.preprocess(img), self.tokenizer([r["title"]])[0]


def cast_model(model, dtype):
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding, torch.nn.LayerNorm)):
            module.to(dtype)
        elif isinstance(module, torch.nn.MultiheadAttention):
            module.to(dtype)
    return model


def main(epochs=5, batch_size=128, lr=1e-5, dtype=torch.bfloat16):
    device = torch.device("cuda")
    model = CLIPRetriever().to(device)
    model = cast_model(model, dtype)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    loader = DataLoader(CaptionSet("data/captions/train.csv", model.preprocess, tokenizer), batch_size=batch_size,
                        shuffle=True, num_workers=8, drop_last=True, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.2, betas=(0.9, 0.98), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        model.train()
        for step, (images, tokens) in enumerate(loader):
            images, tokens = images.to(device, dtype, non_blocking=True), tokens.to(device, non_blocking=True)
            loss = model(images, tokens)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % 50 == 0:
                print(f"{epoch} {step}/{len(loader)} {loss.item():.4f}")
        torch.save({"state_dict": model.state_dict(), "epoch": epoch}, f"retriever_{epoch}.pt")


if __name__ == "__main__":
    main()
