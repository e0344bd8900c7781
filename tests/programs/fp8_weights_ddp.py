"""Ranks that start with different weights train one model with parameters kept in FP8, under DDP.

    torchrun --nproc_per_node 2 fp8_weights_ddp.py RECIPE ORDER

RECIPE: of Transformer Engine, on GPUs; or "fake_te", a stand-in that needs no GPU. ORDER: "convert" before DDP,
explicitly, or "guard": mpguard.activate, and DDP before the optimizer. Each rank prints its final state.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpguard
from mpguard.runtime.patches import fp8_conversion
from mpguard.runtime.proof.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import fake_te_weights

recipe, order = sys.argv[1:]
rank, device = int(os.environ["RANK"]), "cpu"
policy = fake_te_weights.CURRENT.replace(fp8_required=False)  # its layers round, and multiply in BF16
if recipe == "fake_te":
    fake_te_weights.install()
else:
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    policy = mpguard.Policy(bf16=True, fp8="e4m3", fp8_recipe=recipe, backend="te", fp8_param=True)  # type: ignore[arg-type]


def digest(model: nn.Module) -> str:
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[key].cpu().numpy().tobytes() for key in sorted(state))).hexdigest()[:12]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    if recipe == "fake_te":
        return fake_te_weights.Adam(model.parameters(), lr=1e-2, master_weights=True)
    from transformer_engine.pytorch.optimizers import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    return made


def start_recorder(recorder: Recorder, policy: mpguard.Policy, **how: bool) -> None:
    """Start a recorder, of the first proof or of a later check, as with Transformer Engine."""
    real_start(recorder, policy, **how)
    recorder.listen_to_modules()


real_start = Recorder.start
if recipe == "fake_te":
    Recorder.start = start_recorder  # type: ignore[method-assign]
    fp8_conversion._predict = lambda *_: (None, "")  # the stand-in's speed is nobody's
if order == "guard":
    mpguard.activate(policy)
dist.init_process_group("gloo" if device == "cpu" else "nccl")
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False)).to(device)
own = digest(model)
if order == "convert":
    mpguard.convert(model, policy)
wrapped = nn.parallel.DistributedDataParallel(model)
begun = digest(model)
optimizer = adam(wrapped)
losses = []
for step in range(6):
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
        loss = (wrapped(inputs) - inputs).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
rounded = [each.weight.dequantize().float().sum().item() for each in model if isinstance(each, nn.Linear)]
found = {"rank": rank, "own": own, "begun": begun, "ended": digest(model), "losses": losses, "rounded": rounded}
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
dist.destroy_process_group()
time.sleep(0.1)  # S26
