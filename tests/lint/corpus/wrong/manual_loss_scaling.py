import torch


def train(model, optimizer, loader):
    scale = 1024.0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        (loss * scale).backward()  # ! MPG212
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        optimizer.zero_grad()
