"""DeepSpeed ZeRO without a framework around it: the precision is in ds_config.json, and the policy overrides it.

    torchrun --nproc_per_node 2 -m mpguard.run --config examples/mp_deepspeed.yaml examples/train_deepspeed.py

Runs on the CPU too (gloo). Another ZeRO stage: `mpguard init bf16_mixed --strategy deepspeed-zero3 --batch-size 1`
writes mp.yaml and ds_config.json; pass the latter as `--deepspeed_config`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from gpt import GPT, batches, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deepspeed_config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    options = parser.parse_args()

    config = json.loads(options.deepspeed_config.read_text(encoding="utf-8"))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    for step, batch in enumerate(batches(options.steps, rank=engine.global_rank), 1):
        loss = loss_of(engine(batch["input_ids"].to(engine.device)), batch["labels"].to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and (step in (1, options.steps) or step % 10 == 0):
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
