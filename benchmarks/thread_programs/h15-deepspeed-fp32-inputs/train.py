"""DeepSpeed with bf16: the model is bf16, and nothing casts the FP32 inputs.

The thread has fp16, which DeepSpeed takes on few CPUs only.
"""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)


class ForecastMLP(nn.Module):
    def __init__(self, channels=4, window=16, horizon=8, hidden=64):
        super().__init__()
        self.horizon, self.channels = horizon, channels
        self.net = nn.Sequential(
            nn.Linear(channels * window, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, channels * horizon),
        )

    def forward(self, x):
        return self.net(x.flatten(1)).view(-1, self.horizon, self.channels)


model = ForecastMLP()
dataset = TensorDataset(torch.randn(32, 16, 4), torch.randn(32, 8, 4))
model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=dataset
)
loss_fn = nn.MSELoss()
for batch in trainloader:
    x = batch[0].to(model_engine.device)
    y = batch[1].to(model_engine.device)
    out = model_engine(x)
    loss = loss_fn(out, y)
    model_engine.backward(loss)
    model_engine.step()
print(f"loss {loss.item():.3f}")
