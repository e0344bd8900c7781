"""nanoGPT with dtype = "float16": autocast in FP16, and no GradScaler."""

import torch
from torch import nn

dtype = "float16"
device_type = "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = torch.amp.autocast(device_type=device_type, dtype=ptdtype)
torch.manual_seed(1337)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=1e-2, betas=(0.9, 0.95))
for _ in range(4):
    optimizer.zero_grad(set_to_none=True)
    for _ in range(2):
        data = torch.randint(64, (4, 17))
        with ctx:
            loss = nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(f"loss {loss.item():.3f}")
