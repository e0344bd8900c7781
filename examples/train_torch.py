"""A training loop in plain torch: autocast and GradScaler come from the policy.

    mpguard launch --config examples/mp_torch.yaml examples/train_torch.py --steps 20

The same lines serve every recipe: without FP16 the scaler is disabled and passes everything through.
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, batches, loss_of

import mpguard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    policy = mpguard.activate()  # the policy of mp.yaml
    precision = policy.to("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = GPT().to(device, precision.parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = precision.scaler(device)

    for step, batch in enumerate(batches(options.steps), 1):
        with torch.autocast(**precision.autocast(device)):
            loss = loss_of(model(batch["input_ids"].to(device)), batch["labels"].to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step in (1, options.steps) or step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
