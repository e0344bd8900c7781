"""Codes of rules that no longer exist, and the rule that reports their mistakes now.

A retired code is accepted wherever a code is (`select`, `ignore`, suppressions, baselines, `mpguard rule`): it stands
for its successor, and a message names both. No code is used again. This module imports no rule: a run that finds all of
its results in the cache loads none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Retired(NamedTuple):
    """A retired rule. successor: the code that reports its mistakes; None: no rule does, and `why` says why."""

    name: str
    successor: str | None
    why: str


_FORM = "the page lists it among its other forms"

RETIRED: dict[str, Retired] = {
    "MPG112": Retired("fp16-adapters", "MPG103", _FORM),
    "MPG114": Retired("model-cast-in-step", "MPG107", _FORM),
    "MPG115": Retired("dtype-ignores-value", "MPG310", _FORM),
    "MPG116": Retired("half-pipeline-trained", "MPG103", _FORM),
    "MPG118": Retired("policy-repeats-weight-dtype", "MPG107", _FORM),
    "MPG119": Retired("mixed-mode-casts-adapters", "MPG107", _FORM),
    "MPG210": Retired("scaler-update-every-microbatch", "MPG206", _FORM),
    "MPG213": Retired("scaled-loss-discarded", "MPG202", _FORM),
    "MPG214": Retired("gradient-penalty-on-scaled-gradients", "MPG215", _FORM),
    "MPG403": Retired("float8-params-dtype", "MPG415", _FORM),
    "MPG414": Retired("all-gather-with-rowwise", "MPG413", _FORM),
    "MPG504": Retired("step-outside-deepspeed-engine", "MPG501", _FORM),
    "MPG507": Retired("trainer-with-half-model", "MPG103", _FORM),
    "MPG510": Retired("wrong-fsdp-policy-class", "MPG512", _FORM),
    "MPG516": Retired("lightning-clipping", "MPG503", _FORM),
    "MPG520": Retired("deepspeed-file-overwritten", "MPG862", _FORM),
    "MPG521": Retired("unread-precision-key", "MPG518", _FORM),
    "MPG522": Retired("bf16-training-on-old-gpu", "MPG408", _FORM),
    "MPG523": Retired("fp16-training-of-bf16-model", "MPG519", _FORM),
    "MPG524": Retired("backward-outside-lightning", "MPG501", _FORM),
    "MPG525": Retired("clip-every-microbatch", "MPG206", _FORM),
    "MPG526": Retired("fsdp-policy-computes-in-float32", "MPG512", _FORM),
    "MPG527": Retired("megatron-bridge-precision", "MPG849", _FORM),
    "MPG606": Retired("cross-entropy-on-half-logits", "MPG603", _FORM),
    "MPG609": Retired("float32-limits-on-half", "MPG601", _FORM),
    "MPG803": Retired("backend-spelling", "MPG813", _FORM),
    "MPG807": Retired("fp8-without-dynamo", "MPG401", _FORM),
    "MPG810": Retired("deepspeed-ignores-fp8-config", "MPG809", _FORM),
    "MPG812": Retired("all-gather-outside-fsdp2", "MPG413", _FORM),
    "MPG814": Retired("fp8-on-old-gpu", "MPG408", _FORM),
    "MPG816": Retired("bf16-on-old-gpu", "MPG408", _FORM),
    "MPG825": Retired("bf16-and-torch-autocast", "MPG821", _FORM),
    "MPG841": Retired("axolotl-precision-conflict", "MPG849", _FORM),
    "MPG842": Retired("axolotl-fp8-without-compile", "MPG401", _FORM),
    "MPG843": Retired("axolotl-all-gather-without-fsdp2", "MPG413", _FORM),
    "MPG845": Retired("llamafactory-without-mixed-precision", "MPG849", _FORM),
    "MPG846": Retired("neox-precision", "MPG849", _FORM),
    "MPG847": Retired("axolotl-fp8-config", "MPG849", _FORM),
    "MPG848": Retired("unknown-precision-key", "MPG813", _FORM),
    "MPG867": Retired("launch-flags-against-config", "MPG863", _FORM),
    "MPG868": Retired("launch-precision-value", "MPG813", _FORM),
    "MPG869": Retired("launch-bf16-model-in-fp16", "MPG519", _FORM),
    "MPG870": Retired("string-for-boolean", "MPG823", _FORM),
    "MPG873": Retired("fp16-ignores-bf16-option", "MPG310", _FORM),
    "MPG874": Retired("wrong-config-value", "MPG813", _FORM),
    "MPG105": Retired(
        "cast-inside-autocast", None, "such a cast is reported by MPG101 or MPG102 if it loses something"
    ),
    "MPG106": Retired("hard-coded-autocast-dtype", None, "right in 1 of 15 findings in public code"),
    "MPG113": Retired(
        "dtype-map-lacks-choice", None, "wrong in 3 of 3 findings in public code: the missing choice was not used"
    ),
    "MPG309": Retired(
        "autocast-with-dataparallel", None, "torch advises against DataParallel; few programs still run it"
    ),
    "MPG308": Retired("bf16-not-gated", None, "it reported nothing in public code"),
    "MPG312": Retired(
        "custom-function-without-custom-fwd",
        None,
        "it reported nothing in public code, and what is lost shows as an error",
    ),
    "MPG313": Retired(
        "no-grad-in-autocast-cache",
        None,
        "torch 2.11 and newer compute the gradients; wrong in 3 of 3 findings in public code",
    ),
    "MPG316": Retired("float32-into-deepspeed-half", None, "it reported nothing in public code"),
    "MPG405": Retired("backward-in-fp8-autocast", None, "its only finding in public code was wrong: nothing was lost"),
    "MPG410": Retired("fp8-ddp-compile", None, "it was never settled which versions fail"),
    "MPG411": Retired("fp8-fsdp2-checkpointing-compile", None, "it reported a speed, and nothing in public code"),
    "MPG412": Retired("flash-attention-2-with-compile", None, "it reported nothing in public code"),
    "MPG416": Retired("e5m2-recipe", None, "Transformer Engine refuses the recipe with a clear message"),
    "MPG604": Retired(
        "accumulate-in-half", None, "wrong in 2 of 2 findings in public code: autocast returns FP32 losses"
    ),
    "MPG605": Retired("norm-in-half", None, "it reported nothing in public code"),
    "MPG607": Retired(
        "router-in-half",
        None,
        "it reported nothing in public code; the field `fp32_modules` computes routers in FP32",
    ),
    "MPG701": Retired(
        "mixed-tf32-apis", None, "it reported nothing in public code, and torch raises where the two contradict"
    ),
    "MPG702": Retired("tf32-off", None, "it reported a choice of speed"),
    "MPG703": Retired("reduced-precision-reduction", None, "it reported a choice that the code states"),
    "MPG805": Retired(
        "fp8-without-backend", None, "it reported nothing in public code; mpguard names the backend that is used"
    ),
    "MPG808": Retired("low-memory-loading-with-half", None, "accelerate refuses the combination with a clear message"),
    "MPG844": Retired("axolotl-fp8-slow-combination", None, "it reported a speed, and nothing in public code"),
}


def successor(code: str) -> str | None:
    """Return the code that a code stands for: its successor if it is retired, itself otherwise; None if removed."""
    retired = RETIRED.get(code)
    return code if retired is None else retired.successor


def successors(codes: Iterable[str]) -> frozenset[str]:
    """Return the codes that some codes stand for."""
    return frozenset(code for each in codes if (code := successor(each)) is not None)


def by_name(name: str) -> str | None:
    """Return the retired code of a rule's name."""
    return next((code for code, retired in RETIRED.items() if retired.name == name), None)


def explanation(code: str) -> str:
    """Return a clause that says what has become of a retired code."""
    retired = RETIRED[code]
    if retired.successor is None:
        return f"{code} ({retired.name}) was removed: {retired.why}"
    return f"{code} ({retired.name}) is now {retired.successor}: {retired.why}"
