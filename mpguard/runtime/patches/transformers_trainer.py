"""Save the history of delayed scaling with a Trainer's checkpoints, and give its arguments the policy's precision."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import checkpoints
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks
from mpguard.targets.inject import Change


def _trainer(parameter: str, act: Callable[..., None]) -> Callable[[AnyFunction], AnyFunction]:
    """Return a wrapper of a Trainer's method that saves or loads the optimizer; `act` does so for the FP8 history.

    parameter: the argument that holds the checkpoint's folder.
    """

    def wrap(original: AnyFunction) -> AnyFunction:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            folder = signature.bind(self, *args, **kwargs).arguments[parameter]
            if guards.current() is not None and folder is not None:
                act([self.model], folder)
            return result

        return wrapped

    return wrap


@patch(
    "transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig.trainer_config_process",
    needs=("args",),
    reason="it refuses a DeepSpeed config that sets the precision if TrainingArguments do not",
    lost="a Trainer refuses the policy's precision in a DeepSpeed config unless its arguments have it",
    check=checks.trainer_with_deepspeed,
)
def _trainer_and_deepspeed(original: AnyFunction) -> AnyFunction:
    """Put the policy's `bf16` and `fp16` into `TrainingArguments`, so that they match the DeepSpeed config."""

    @functools.wraps(original)
    def trainer_config_process(self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None:
            for field in ("bf16", "fp16"):
                wanted = getattr(guard.plan.policy, field)
                if getattr(args, field) and not wanted:
                    guard.reporter.log_override("TrainingArguments", Change(field, True, False))
                setattr(args, field, wanted)
        return original(self, args, *more, **kwargs)

    return trainer_config_process


patch(
    "transformers.trainer:Trainer._save_optimizer_and_scheduler",
    needs=("output_dir",),
    reason="its checkpoints hold weights as plain tensors: the history of delayed scaling is saved in a file "
    "next to them",
    lost="checkpoints of a Trainer lack the history of delayed scaling",
    check=checks.trainer,
)(_trainer("output_dir", checkpoints.save))


patch(
    "transformers.trainer:Trainer._load_optimizer_and_scheduler",
    needs=("checkpoint",),
    reason="the history of delayed scaling is loaded with the checkpoint",
    lost="checkpoints of a Trainer lack the history of delayed scaling",
    check=checks.trainer,
)(_trainer("checkpoint", checkpoints.load))
