"""Patches of transformers: its Trainer, the matrix products of its experts, the masks of its causal models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mpguard.nn.attention import find_no_packed_sequences, leave_to_eager_code, skip_causal_mask
from mpguard.nn.grouped_mm import autocast_grouped_mm
from mpguard.runtime import checkpoints
from mpguard.runtime import guard as guards
from mpguard.runtime.patches.patch import AnyFunction, Patch
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


PATCHES = (
    Patch(
        "transformers.trainer",
        "Trainer._save_optimizer_and_scheduler",
        ("output_dir",),
        "its checkpoints hold weights as plain tensors: the history of delayed scaling is saved in a file next to them",
        "transformers 5.23.0",
        _trainer("output_dir", checkpoints.save),
    ),
    Patch(
        "transformers.trainer",
        "Trainer._load_optimizer_and_scheduler",
        ("checkpoint",),
        "the history of delayed scaling is loaded with the checkpoint",
        "transformers 5.23.0",
        _trainer("checkpoint", checkpoints.load),
    ),
    Patch(
        "transformers.integrations.deepspeed",
        "HfTrainerDeepSpeedConfig.trainer_config_process",
        ("args",),
        "it refuses a DeepSpeed config that sets the precision if TrainingArguments do not",
        "transformers 5.23.0",
        _trainer_and_deepspeed,
    ),
    Patch(
        "transformers.integrations.moe",
        "_grouped_mm",
        ("input", "weight", "offs"),
        "autocast does not cast its inputs: experts compute in the dtype of their master weights (S30)",
        "transformers 5.23.0",
        autocast_grouped_mm,
        traced=True,
    ),
    Patch(
        "transformers.masking_utils",
        "_ignore_causal_mask_sdpa",
        ("padding_mask", "kv_length", "local_attention_size"),
        "under torch.compile attention gets a mask in place of `is_causal` (S38)",
        "transformers 5.23.0",
        skip_causal_mask,
        traced=True,
    ),
    Patch(
        "transformers.masking_utils",
        "find_packed_sequence_indices",
        ("position_ids",),
        "the same: it does not read position ids while it is compiled (S38)",
        "transformers 5.23.0",
        find_no_packed_sequences,
        traced=True,
    ),
    *(
        Patch(
            "transformers.masking_utils",
            target,
            ("config",),
            "the same: dynamo compiles it alone where the loop over FSDP2's blocks is eager (S38)",
            "transformers 5.23.0",
            leave_to_eager_code,
            traced=True,
        )
        for target in ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
    ),
)  # fmt: skip
