"""Print, for each JSON argument, the dtype of a model that DeepSpeed has initialized, or the error.

An argument has a DeepSpeed config and, if accelerate is to prepare the model, its `mixed_precision`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin


def dtype_of(config: dict[str, Any], mode: str | None) -> str:
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    if mode is None:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    else:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        AcceleratorState._reset_state()
        accelerator = Accelerator(mixed_precision=mode, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        engine, _ = accelerator.prepare(model, optimizer)
    weight = next(engine.parameters())
    loss = engine(torch.randn(2, 16).to(weight.dtype)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    return str(weight.dtype).removeprefix("torch.")


for line in sys.argv[1:]:
    given = json.loads(line)
    try:
        found = dtype_of({"train_micro_batch_size_per_gpu": 2, **given["config"]}, given.get("mode"))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
os._exit(0)  # after several engines in one process, gloo's threads abort it at exit now and then
