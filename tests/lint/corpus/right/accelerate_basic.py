"""The five lines that Accelerate asks for."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator


def main(dataset, model):
    accelerator = Accelerator()
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=16)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    model.train()
    for _ in range(10):
        for source, targets in data:
            optimizer.zero_grad()
            output = model(source)
            loss = F.cross_entropy(output, targets)
            accelerator.backward(loss)
            optimizer.step()
