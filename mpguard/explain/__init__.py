"""Explain a run before it starts: each precision setting in force, where it comes from, what it overrides.

    model        plain data: `Origin`, `Given`, `Claim`, `Resolved`, `UnreadKey`, `Explanation`
    inputs       the files, flags and variables that a run is made of (`RunInputs`)
    script       what the training script itself sets, by the linter's facts
    launch       what `accelerate launch` hands to the workers, and the engine
    accelerate   what `Accelerator` and the Trainer make of it: mode, FP8, FSDP, loss scaling, compilation
    deepspeed    what DeepSpeed's engine gets
    policy       the same under a policy, which replaces the settings of all others
    unread       the keys that nothing reads
    live         what a proof file observed
    trainer_configs  a config of axolotl, LLaMA-Factory, Megatron Bridge or NeMo 1.x, which decides its run alone

No framework is imported: each module states what accelerate 1.15, transformers 5.23 and DeepSpeed 0.19.8 do, and
tests/explain compares its answers with these libraries.
"""

from __future__ import annotations

from mpguard.explain.inputs import RunInputs, gather, trainer_config
from mpguard.explain.model import Explanation, Origin, Resolved, UnreadKey
from mpguard.explain.resolve import explain
from mpguard.explain.trainer_configs import explain_config

__all__ = [
    "Explanation",
    "Origin",
    "Resolved",
    "RunInputs",
    "UnreadKey",
    "explain",
    "explain_config",
    "gather",
    "trainer_config",
]
