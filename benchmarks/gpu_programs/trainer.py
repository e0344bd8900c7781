"""The Trainer of transformers: engine and precision come from mp.yaml. See loop.py."""

from __future__ import annotations

import tempfile
from typing import Any

from common import RATE, ROWS, Chain, Probe, adam, model, options, world
from transformers import Trainer, TrainerCallback, TrainingArguments


class Look(TrainerCallback):
    """Reports the steps of the Trainer to the probe."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.trainer = probe, None

    def on_step_begin(self, _arguments: Any, state: Any, _control: Any, **_more: Any) -> None:
        if state.global_step == 0:
            wrapped: Any = self.trainer.model_wrapped  # type: ignore[attr-defined]
            engine = wrapped if hasattr(wrapped, "communication_data_type") else None
            self.probe.begin(engine.module if engine is not None else wrapped, engine)

    def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: Any = None, **_more: Any) -> None:
        if "loss" in logs:
            self.probe.step(float(logs["loss"]))


def main() -> None:
    parsed = options()
    probe = Probe(parsed.out)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=parsed.steps, per_device_train_batch_size=ROWS, learning_rate=RATE,
            weight_decay=0.0, lr_scheduler_type="constant", optim="adamw_torch", logging_steps=1,
            logging_nan_inf_filter=False, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        look = Look(probe)
        net = model(parsed)
        trainer = Trainer(
            model=net, args=arguments, train_dataset=Chain(parsed.steps, world()[1]), callbacks=[look],
            optimizers=(adam(net.parameters(), parsed.masters) if parsed.masters else None, None),
        )  # fmt: skip
        look.trainer = trainer  # type: ignore[assignment]
        trainer.train()
        probe.end()


if __name__ == "__main__":
    main()
