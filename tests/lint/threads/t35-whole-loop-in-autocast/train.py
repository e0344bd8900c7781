import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from model import CharTransformer


class Chars(Dataset):
    def __init__(self, ids, ctx):
        self.ids, self.ctx = ids, ctx

    def __len__(self):
        return len(self.ids) - self.ctx - 1

    def __getitem__(self, i):
        return self.ids[i:i + self.ctx], self.ids[i + 1:i + 1 + self.ctx]


def load_text(path):
    with open(path) as f:
        text = f.read()
    chars = sorted(set(text))
    table = {c: i for i, c in enumerate(chars)}
    return torch.tensor([table[c] for c in text]), chars


class Trainer:
    def __init__(self, args):
        self.args = args
        self.args.is_cuda = torch.cuda.is_available()
        ids, self.chars = load_text(args.text)
        n = int(0.9 * len(ids))
        self.train_dl = DataLoader(Chars(ids[:n], args.ctx), args.batch_size, shuffle=True, drop_last=True)
        self.val_dl = DataLoader(Chars(ids[n:], args.ctx), args.batch_size, drop_last=True)
        self.model = CharTransformer(len(self.chars), args.embed, args.layers, ctx=args.ctx)
        if self.args.is_cuda:
            self.model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.loss_fn = nn.CrossEntropyLoss()

    def ce(self, logits, y):
        return self.loss_fn(logits.view(-1, logits.shape[-1]), y.reshape(-1))

    def train_epoch(self, epoch):
        self.model.train()
        for step, (x, y) in enumerate(self.train_dl):
            if self.args.is_cuda:
                x, y = x.cuda(), y.cuda()
            logits = self.model(x)
            loss = self.ce(logits, y)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if step % 50 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if step >= self.args.steps_per_epoch:
                break

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total, n = 0.0, 0
        for x, y in self.val_dl:
            if self.args.is_cuda:
                x, y = x.cuda(), y.cuda()
            total += self.ce(self.model(x), y).item()
            n += 1
            if n == 20:
                break
        return total / max(n, 1)

    def fit(self):
        weight_dtype = getattr(torch, self.args.dtype)
        os.makedirs("runs", exist_ok=True)
        with torch.autocast("cuda" if self.args.is_cuda else "cpu", dtype=weight_dtype):
            for epoch in range(self.args.epochs):
                self.train_epoch(epoch)
                print(f"epoch {epoch} val {self.validate():.4f}")
                torch.save(self.model.state_dict(), f"runs/embed{self.args.embed}_layers{self.args.layers}_autocast.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--text", default="input.txt")
    p.add_argument("--embed", type=int, default=64)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--steps_per_epoch", type=int, default=500)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--dtype", default="bfloat16")
    Trainer(p.parse_args()).fit()
