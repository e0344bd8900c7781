"""A complete script with accelerate that sets no precision; each rank prints its final state."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

parser = argparse.ArgumentParser()
parser.add_argument("words", nargs="*")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--mixed-precision", help="set by the script itself")
parser.add_argument("--scaler", action="store_true", help="the script passes a handler")
parser.add_argument("--exit", type=int, nargs=2, metavar=("RANK", "STATUS"), help="after the first step")
parser.add_argument("--one-layer", action="store_true", help="the model is a single Linear")
parser.add_argument("--sleep", type=float, default=0, help="seconds, after the first step")
options = parser.parse_args()

handlers = [GradScalerKwargs(init_scale=8.0)] if options.scaler else None
accelerator = Accelerator(mixed_precision=options.mixed_precision, kwargs_handlers=handlers)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
if options.one_layer:
    model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
seen = []
(model if options.one_layer else model[0]).register_forward_hook(
    lambda _module, _inputs, output: seen.append(str(output.dtype))
)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 8))
for inputs, targets in loader:
    # A DeepSpeed engine takes inputs of its own dtype only.
    loss = torch.nn.functional.cross_entropy(model(inputs.to(next(model.parameters()).dtype)).float(), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if options.exit and options.exit[0] == accelerator.process_index:
        sys.exit(options.exit[1])
    if options.sleep:
        print(f"stepped {os.getpid()}", flush=True)
        time.sleep(options.sleep)
print(json.dumps({
    "rank": accelerator.process_index, "world": accelerator.num_processes, "arguments": sys.argv[1:], "name": __name__,
    "compute": seen[-1], "master": str(next(model.parameters()).dtype), "type": str(accelerator.distributed_type),
    "policy": os.environ.get("MPGUARD_POLICY"), "mode": accelerator.mixed_precision,
}), flush=True)  # fmt: skip
accelerator.end_training()
