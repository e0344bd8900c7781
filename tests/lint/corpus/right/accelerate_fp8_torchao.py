"""FP8 through Accelerate and torchao, compiled."""

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, TorchDynamoPlugin


def train(model, loader):
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[AORecipeKwargs(enable_fsdp_float8_all_gather=False)],
        dynamo_plugin=TorchDynamoPlugin(backend="inductor"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
