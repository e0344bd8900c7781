"""FP8 through Accelerate and Transformer Engine, with the recipe set in the code."""

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs


def train(model, loader):
    kwargs = [TERecipeKwargs(fp8_format="HYBRID", amax_history_len=32, amax_compute_algo="max")]
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
