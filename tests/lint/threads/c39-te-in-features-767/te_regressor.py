import argparse

import numpy as np
import torch
import torch.nn as nn
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader, Dataset
from transformer_engine.common import recipe

IN_FEATURES = 767
OUT_FEATURES = 3072
BATCH = 2048


class FeatureTable(Dataset):
    def __init__(self, path):
        d = np.load(path)
        self.x = torch.from_numpy(d["x"]).float()
        self.y = torch.from_numpy(d["y"]).float()
        assert self.x.shape[1] == IN_FEATURES

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = te.Linear(IN_FEATURES, OUT_FEATURES, bias=True)
        self.mid = te.LayerNormMLP(OUT_FEATURES, 4 * OUT_FEATURES)
        self.out = nn.Linear(OUT_FEATURES, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(h + self.mid(h)).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="features.npz")
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()

    model = Regressor().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(FeatureTable(args.data), BATCH, shuffle=True, drop_last=True, num_workers=4)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)

    for epoch in range(args.epochs):
        total = 0.0
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
                pred = model(x)
            loss = torch.nn.functional.mse_loss(pred, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch} mse {total / len(loader):.5f}")
        torch.save(model.state_dict(), f"regressor_{epoch}.pt")


if __name__ == "__main__":
    main()
