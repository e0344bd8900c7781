import argparse
import glob
import os

import torch
from torch.utils.data import DataLoader, Dataset

from diffsynth_lite.pipeline import WanTrainingModule


class CachedVideos(Dataset):
    def __init__(self, root):
        self.files = sorted(glob.glob(os.path.join(root, "*.pth")))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], weights_only=True)
        return d["latents"], d["context"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dataset_base_path", required=True)
    p.add_argument("--dit_path")
    p.add_argument("--learning_rate", type=float, default=1e-5)
    p.add_argument("--num_epochs", type=int, default=2)
    p.add_argument("--output_path", default="models/train/wan_full")
    args = p.parse_args()
    model = WanTrainingModule(args.dit_path)
    opt = torch.optim.AdamW(model.dit.parameters(), lr=args.learning_rate, weight_decay=0.01)
    loader = DataLoader(CachedVideos(args.dataset_base_path), batch_size=1, shuffle=True, num_workers=2)
    os.makedirs(args.output_path, exist_ok=True)
    for epoch in range(args.num_epochs):
        for step, (latents, context) in enumerate(loader):
            loss = model(latents, context)
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            if step % 20 == 0:
                print(epoch, step, loss.item())
        torch.save(model.dit.state_dict(), os.path.join(args.output_path, f"epoch-{epoch}.pth"))


if __name__ == "__main__":
    main()
