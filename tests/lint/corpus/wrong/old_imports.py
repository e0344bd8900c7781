import torch
from torch.cuda.amp import GradScaler, autocast  # ! MPG302

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
for x in [torch.randn(4, 8, device="cuda")]:
    with autocast():
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
