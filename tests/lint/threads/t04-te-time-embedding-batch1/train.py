import argparse
import glob

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader, Dataset
from transformer_engine.common.recipe import DelayedScaling, Format

from convert import to_te_linear
from dit import VideoDiT


class LatentFiles(Dataset):
    def __init__(self, pattern):
        self.files = sorted(glob.glob(pattern))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.load(self.files[i], weights_only=True).to(torch.bfloat16)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--latents", default="latents/*.pt")
    p.add_argument("--steps", type=int, default=20000)
    p.add_argument("--lr", type=float, default=1e-5)
    args = p.parse_args()

    model = VideoDiT().to("cuda", torch.bfloat16)
    model = to_te_linear(model)
    print(model)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    loader = DataLoader(LatentFiles(args.latents), batch_size=1, shuffle=True, num_workers=4)

    step = 0
    while step < args.steps:
        for latents in loader:
            latents = latents.cuda(non_blocking=True)
            noise = torch.randn_like(latents)
            sigma = torch.rand(latents.shape[0], 1, 1, device="cuda", dtype=latents.dtype)
            noisy = (1 - sigma) * latents + sigma * noise
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                pred = model(noisy, sigma.flatten() * 1000)
            loss = F.mse_loss(pred.float(), (noise - latents).float())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if step % 50 == 0:
                print(step, loss.item())
            if step % 5000 == 0:
                torch.save(model.state_dict(), f"dit_{step}.pt")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
