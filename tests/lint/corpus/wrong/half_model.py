import torch

model = torch.nn.Linear(8, 8).cuda().half()  # ! MPG101
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.randn(4, 8, device="cuda")]:
    loss = model(x.half()).float().sum()  # ! MPG101
    loss.backward()
    optimizer.step()
