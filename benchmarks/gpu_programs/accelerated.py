"""Accelerate: engine and precision come from mp.yaml. See loop.py."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import ROWS, Chain, Probe, adam, model, options, world


def main() -> None:
    parsed = options()
    accelerator = Accelerator(gradient_accumulation_steps=parsed.accumulation)
    net = model(parsed)
    optimizer = adam(net.parameters(), parsed.masters)
    chain = Chain(parsed.steps * parsed.accumulation, world()[1])
    loader = torch.utils.data.DataLoader(chain, batch_size=ROWS)
    trained, optimizer, data = accelerator.prepare(net, optimizer, loader)
    probe = Probe(parsed.out)
    engine = trained if hasattr(trained, "communication_data_type") else None
    probe.begin(engine.module if engine is not None else trained, engine)
    for batch in data:
        with accelerator.accumulate(trained):
            loss = trained(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            probe.step(loss)
    probe.end()
    accelerator.end_training()


if __name__ == "__main__":
    main()
