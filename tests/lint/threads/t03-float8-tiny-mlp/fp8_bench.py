import copy
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import convert_to_float8_training

torch.set_float32_matmul_precision("high")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(32, 32)
        self.layer2 = nn.Linear(32, 32)

    def forward(self, x):
        x = torch.relu(self.layer1(x))
        return self.layer2(x)


def make_loader(n=65536, batch_size=64):
    x = torch.randn(n, 32)
    y = torch.tanh(x @ torch.randn(32, 32))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, drop_last=True)


def train(model, loader, epochs=5):
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters())
    model.train()
    start = time.time()
    for epoch in range(epochs):
        for data, target in loader:
            data, target = data.cuda(non_blocking=True), target.cuda(non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = model(data)
                loss = criterion(output, target)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    torch.cuda.synchronize()
    return time.time() - start


def main():
    torch.manual_seed(0)
    loader = make_loader()
    base = Model().cuda()
    fp8 = copy.deepcopy(base)
    convert_to_float8_training(fp8)
    base, fp8 = torch.compile(base), torch.compile(fp8)
    train(base, loader, epochs=1)
    train(fp8, loader, epochs=1)
    print(f"Training time in BF16: {train(base, loader):.2f} seconds")
    print(f"Training time in FP8: {train(fp8, loader):.2f} seconds")
    torch.save(fp8._orig_mod.state_dict(), "fp8_model.pt")


if __name__ == "__main__":
    main()
