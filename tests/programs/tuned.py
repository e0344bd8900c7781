"""A training with more steps than `mpguard tune` takes: `tuned.py KIND [--fault NAME]`, in three kinds of scripts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("plain", "accelerate", "trainer"))
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--fault", choices=("error", "memory", "hang", "catches", "half"))
parser.add_argument("--only-in", default="", help="the fault occurs only where the output folder has this in its path")
parser.add_argument("--output", default="", help="a folder for what it writes")
options = parser.parse_args()
if options.only_in and options.only_in not in os.environ["MPGUARD_TUNE_OUT"]:
    options.fault = None


class Model(torch.nn.Module):
    """Takes what the Trainer passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def happen(step: int) -> None:
    """Do what the script does wrong, after some steps."""
    if step != 4:
        return
    if options.fault == "error":
        raise RuntimeError("the shards do not fit")
    if options.fault == "memory":
        torch.empty(1 << 50, dtype=torch.uint8)


def hang() -> None:
    """Wait, in spite of SIGTERM, and with a child in another session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("pids.part").write_text(f"{os.getpid()} {child.pid}")
    Path("pids.part").rename("pids")
    time.sleep(600)


def train(backward: Callable[[torch.Tensor], None], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(options.steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 16), torch.randint(0, 4, (8,)))["loss"]
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        happen(step)


def main() -> None:
    if options.fault == "hang":
        hang()
    torch.manual_seed(0)
    model = Model()
    if options.kind == "trainer":
        from transformers import Trainer, TrainingArguments

        data = [{"inputs": torch.randn(16), "labels": torch.tensor(index % 4)} for index in range(64)]
        arguments = TrainingArguments(
            output_dir=options.output, use_cpu=True, max_steps=options.steps, per_device_train_batch_size=8,
            report_to=[], save_steps=5, disable_tqdm=True, dataloader_num_workers=1,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=data).train()
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.fault == "half":
        model.half()
    if options.kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(model, optimizer)
        train(accelerator.backward, model, optimizer)
    else:
        train(lambda loss: loss.backward(), model, optimizer)


if options.fault == "catches":
    assert sys.stdin.read() == ""
    try:
        main()
    except BaseException as error:
        Path(options.output, "caught").write_text(repr(error))
    finally:
        Path(options.output, "finally").write_text("")
else:
    main()
