import torch
from accelerate import Accelerator


def train(model, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()  # ! MPG501
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # ! MPG503
        optimizer.step()
        optimizer.zero_grad()
