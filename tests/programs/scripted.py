"""A custom training loop on the CPU in one process; the arguments configure it."""

from __future__ import annotations

import argparse
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--backward-only", action="store_true", help="gradients, but no optimizer step")
parser.add_argument("--evaluate", action="store_true", help="no training at all")
parser.add_argument("--autocast", default="bfloat16", help="dtype, or none")
parser.add_argument("--parameters", default="float32")
parser.add_argument("--scaler", type=float, help="a GradScaler with this first scale")
parser.add_argument("--always-inf", action="store_true", help="every gradient overflows")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--float8", action="store_true", help="torchao's emulated FP8 in the second layer")
parser.add_argument(
    "--resume", choices=("fp32", "bf16"), help="load a checkpoint with such states before the last step"
)
parser.add_argument("--compile", action="store_true", help="the whole model, without graph breaks")
parser.add_argument("--swallow", action="store_true", help="catch every exception of the step")
options = parser.parse_args()

torch.manual_seed(0)
dtype = getattr(torch, options.parameters)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).to(dtype)
if options.float8:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: name == "2"
    )
if options.compile:
    model = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=options.scaler) if options.scaler else None

if options.evaluate:
    with torch.no_grad():
        model(torch.randn(4, 16, dtype=dtype))
    print("evaluated")
    sys.exit(0)

for step in range(options.steps):
    if options.resume and step == options.steps - 1:
        state = optimizer.state_dict()
        if options.resume == "bf16":
            optimizer = torch.optim.AdamW(model.to(torch.bfloat16).parameters(), lr=1e-3)
        optimizer.load_state_dict(state)
    for _ in range(options.accumulate):
        enabled = options.autocast != "none"
        with torch.autocast("cpu", getattr(torch, options.autocast, None), enabled=enabled):
            inputs = torch.randn(16, 16, dtype=next(model.parameters()).dtype)
            loss = model(inputs).float().pow(2).mean()
        loss = loss * float("inf") if options.always_inf else loss
        (scaler.scale(loss) if scaler else loss).backward()
    if options.backward_only:
        continue
    try:
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    except Exception:
        if not options.swallow:
            raise
    optimizer.zero_grad()
if options.compile:
    from torch._dynamo.utils import counters

    print("graphs", counters["stats"]["unique_graphs"])
print("finished")
