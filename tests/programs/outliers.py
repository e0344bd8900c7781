"""A small model in plain torch, one of whose layers gets an input with outliers, as trained transformers have them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn


class Block(nn.Module):
    """An MLP. outliers: the factor of 4 of its 64 hidden features."""

    def __init__(self, outliers: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        factors = torch.ones(64)
        factors[:4] = outliers
        self.register_buffer("factors", factors)
        with torch.no_grad():
            self.down.weight /= factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu() * self.factors)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(1.0), Block(1e5)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    if options.out is not None:
        (options.out / "log.txt").write_text("begun")
    torch.manual_seed(0)
    model = Net() if options.eager else torch.compile(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights of the outliers would grow at once
    for _ in range(options.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.randn(256, 32)).float(), torch.randint(10, (256,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
