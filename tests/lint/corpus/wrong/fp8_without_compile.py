import torch
from torchao.float8 import convert_to_float8_training

model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
convert_to_float8_training(model)  # ! MPG401 MPG418
optimizer = torch.optim.AdamW(model.parameters())
for x in [torch.randn(16, 512, device="cuda")]:
    model(x).sum().backward()
    optimizer.step()
