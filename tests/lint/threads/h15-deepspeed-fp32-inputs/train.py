import argparse

import deepspeed
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset


class SensorWindows(Dataset):
    def __init__(self, path, window=96, horizon=24):
        self.series = np.load(path).astype(np.float32)
        self.window = window
        self.horizon = horizon

    def __len__(self):
        return len(self.series) - self.window - self.horizon

    def __getitem__(self, i):
        x = self.series[i:i + self.window]
        y = self.series[i + self.window:i + self.window + self.horizon]
        return torch.from_numpy(x), torch.from_numpy(y)


class ForecastMLP(nn.Module):
    def __init__(self, channels=8, window=96, horizon=24, hidden=4096, depth=8):
        super().__init__()
        self.horizon, self.channels = horizon, channels
        layers = [nn.Linear(channels * window, hidden), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        layers.append(nn.Linear(hidden, channels * horizon))
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x.flatten(1)).view(-1, self.horizon, self.channels)


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--data", default="data/sensors.npy")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ckpt_dir", default="checkpoints")
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    args = get_args()
    model = ForecastMLP()
    dataset = SensorWindows(args.data)
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset
    )
    loss_fn = nn.MSELoss()
    for epoch in range(args.epochs):
        running = 0.0
        for i, batch in enumerate(trainloader):
            x = batch[0].to(model_engine.local_rank)
            y = batch[1].to(model_engine.local_rank)
            out = model_engine(x)
            loss = loss_fn(out, y)
            model_engine.backward(loss)
            model_engine.step()
            running += loss.item()
            if i % 100 == 99 and model_engine.local_rank == 0:
                print(f"[{epoch}, {i + 1}] loss {running / 100:.5f}")
                running = 0.0
        model_engine.save_checkpoint(args.ckpt_dir, tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
