import argparse
import glob
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from model.dit import WanModel


class TensorDataset(Dataset):
    def __init__(self, base):
        self.files = sorted(glob.glob(os.path.join(base, "*.tensors.pth")))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], weights_only=True)
        return d["latents"], d["pose_latents"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dataset_path", required=True)
    p.add_argument("--dit_path")
    p.add_argument("--learning_rate", type=float, default=1e-5)
    p.add_argument("--max_epochs", type=int, default=10)
    p.add_argument("--output_path", default="models/train")
    args = p.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    model = WanModel()
    if args.dit_path:
        model.load_state_dict(torch.load(args.dit_path, map_location="cpu"), strict=False)
    model = model.to(device=device, dtype=dtype)
    model.requires_grad_(False)
    for n, q in model.named_parameters():
        q.requires_grad_("pose" in n or "self_attn" in n)
    opt = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=args.learning_rate)
    loader = DataLoader(TensorDataset(args.dataset_path), batch_size=1, shuffle=True, num_workers=1)
    os.makedirs(args.output_path, exist_ok=True)
    for epoch in range(args.max_epochs):
        model.train()
        for latents, pose in loader:
            latents, pose = latents.to(device, dtype), pose.to(device, dtype)
            sigma = torch.rand(latents.shape[0], device=device)
            noise = torch.randn_like(latents)
            s = sigma[:, None, None].to(dtype)
            with torch.autocast("cuda", dtype=dtype):
                pred = model((1 - s) * latents + s * noise, pose, sigma * 1000)
            loss = F.mse_loss(pred.float(), (noise - latents).float())
            loss.backward()
            opt.step()
            opt.zero_grad()
        print(epoch, loss.item())
        torch.save({n: q for n, q in model.named_parameters() if q.requires_grad},
                   os.path.join(args.output_path, f"epoch={epoch}.ckpt"))


if __name__ == "__main__":
    main()
