import argparse

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader, TensorDataset
from transformer_engine.common import recipe


class MLP(torch.nn.Module):
    def __init__(self, hidden=4096, ffn=16384, n_out=4096):
        super().__init__()
        self.fc1 = te.Linear(hidden, ffn, bias=True)
        self.fc2 = te.Linear(ffn, n_out, bias=True)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def load_features(path):
    blob = torch.load(path, weights_only=True)
    return TensorDataset(blob["x"].float(), blob["y"].float())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="features.pt")
    p.add_argument("--batch-size", type=int, default=50)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--fp8", action="store_true")
    args = p.parse_args()

    loader = DataLoader(load_features(args.data), batch_size=args.batch_size, shuffle=True, num_workers=2)
    model = MLP().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for x, y in loader:
            x, y = x.cuda(), y.cuda()
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                with te.fp8_autocast(enabled=args.fp8, fp8_recipe=fp8_recipe):
                    out = model(x)
            loss = F.mse_loss(out.float(), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.5f}")
    torch.save(model.state_dict(), "te_mlp.pt")


if __name__ == "__main__":
    main()
