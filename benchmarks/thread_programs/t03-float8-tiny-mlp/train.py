"""torchao's float8 for layers of 32 by 32.

The layers emulate FP8, which needs no GPU.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(32, 32)
        self.layer2 = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


torch.manual_seed(0)
x = torch.randn(512, 32)
loader = DataLoader(TensorDataset(x, torch.tanh(x @ torch.randn(32, 32))), batch_size=64, shuffle=True, drop_last=True)
model = Model()
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.Adam(model.parameters())
for data, target in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(data), target)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
