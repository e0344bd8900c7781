"""The fields of a policy that a run can enforce: those that its targets carry, and those that mpguard implements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpguard.core.errors import PolicyError
from mpguard.policy import hardware, speed
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import carriers, get, required_fields
from mpguard.targets.settings import show

#: Targets whose runs mpguard guards: it builds the objects of the other targets, and converts the model itself.
GUARDED_TARGETS = ("accelerate", "deepspeed")

#: The fields that mpguard itself enforces in these runs: which layers become FP8, which compute in FP32, where the
#: master weights are, and how models are compiled.
CONVERTER_FIELDS = frozenset({
    "fp32_modules", "fp8_exclude", "fp8_modules", "fp8_head", "fp8_experts", "fp8_calibration", "fp8_weight_cache",
    "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "master_weights",
    "compile_mode",
})  # fmt: skip


def targets_of_run(target: str, policy: Policy, strategy: str | None = None) -> tuple[str, ...]:
    """Return the targets that take part in a run whose config is one of `target`'s.

    In a guarded run mpguard builds the objects of all of them. Other trainers (axolotl, megatron, ...) build their own
    objects, so that only their own target takes part.
    """
    if target not in GUARDED_TARGETS:
        return (target,)
    engine = {"fsdp1": "fsdp1", "fsdp2": "fsdp2"}.get(strategy or "")
    if strategy is not None and strategy.startswith("deepspeed"):
        engine = "deepspeed"
    return tuple(dict.fromkeys((target, *([engine] if engine else []), *policy.backends, "torch")))


#: Strategies under which a rank has its part of each weight, and whole weights only while they are used.
SHARDED_WEIGHTS = ("fsdp1", "fsdp2", "deepspeed-zero3")

#: The optimizer that keeps FP32 master weights for parameters in FP8.
FUSED_ADAM = "transformer_engine.pytorch.optimizers.FusedAdam(model.parameters(), ..., master_weights=True)"

#: The difference for a run without parameters in FP8.
SAME_PRODUCTS = "The matmuls are the same: layers quantize exact weights at each forward pass"

#: Library -> how, and in which runs, it keeps parameters in FP8: see `fp8_weights`.
FP8_WEIGHTS = {
    "te": "Transformer Engine's FP8 weights, in one process or under DDP, with fp8_recipe delayed, tensorwise or "
    "blockwise and its FusedAdam(master_weights=True)",
    "torchao": "torchao's float8 all-gather, under FSDP2, with fp8_recipe tensorwise in every block",
}


#: Why a wish for parameters in FP8 goes without float8 all-gather.
SLOWER_ALL_GATHER = (
    f"float8 all-gather is slower than without below {speed.ALL_GATHER_RANKS} GPUs ({speed.ALL_GATHER_MEASURED})"
)


def fp8_weights(policy: Policy, strategy: str | None, processes: int | None = None) -> str | None:
    """Return the library that keeps the parameters of a guarded run in FP8; None if the policy or the run has none.

    te: an optimizer with FP32 master weights has the exact values. FSDP2 would shard block-wise weights in high
    precision, FSDP1 and DeepSpeed copy all weights into buffers. torchao: accelerate enables the all-gather, and the
    weights stay exact; a wish needs enough processes for it to pay. Without a strategy: the library that does so under
    any strategy. processes: None if their number is not known.
    """
    if not policy.fp8_param or policy.fp8_modules:
        return None
    if strategy == "fsdp2":
        gathered = policy.fp8_recipe == "tensorwise" and not policy.first_last_layers_bf16
        if policy.wishes and not speed.all_gather_pays(processes):
            return None
        return "torchao" if gathered and "torchao" in policy.backends else None
    quantized = policy.fp8_recipe in ("delayed", "tensorwise", "blockwise") and "te" in policy.backends
    if strategy in (None, "single", "ddp") and quantized:
        return "te"
    return fp8_weights(policy, "fsdp2") if strategy is None else None


def without_fp8_weights(policy: Policy, strategy: str | None, processes: int | None = None) -> str | None:
    """Return why a guarded run cannot keep its parameters in FP8; None if it can, or the policy does not have it.

    The optimizer is not known here. processes: None if their number is not known.
    """
    if not policy.fp8_param:
        return None
    if policy.master_weights == "optimizer" and strategy != "fsdp2":
        return "the FP32 master weights are mpguard's own (master_weights: optimizer)"
    if policy.fp8_modules:
        return "not supported with fp8_modules: a recipe per module"
    library = fp8_weights(policy, strategy, processes)
    if library is None and fp8_weights(policy, strategy) is not None:
        return SLOWER_ALL_GATHER
    if library is None:
        under = f"under {strategy} " if strategy else ""
        return f"not supported {under}with fp8_recipe {policy.fp8_recipe} ({' or '.join(policy.backends)})"
    here = hardware.detect()
    if policy.wishes and here.gpu is not None and library not in here.libraries:
        return f"{hardware.LIBRARY_NAMES[library]} is not installed here"
    return None


def slower_demand(policy: Policy, strategy: str | None, processes: int | None) -> str | None:
    """Return what a demand of a policy costs where a wish for the same would be off; None if there is none.

    processes: None if their number is not known.
    """
    gathers = policy.fp8_param is True and strategy == "fsdp2" and fp8_weights(policy, strategy) == "torchao"
    return None if not gathers or speed.all_gather_pays(processes) else SLOWER_ALL_GATHER


def left_out_at_start(policy: Policy, strategy: str | None, processes: int | None) -> dict[str, str]:
    """Return the wishes that a guarded run goes without, as far as that is known before it starts: field -> reason.

    processes: None if their number is not known.
    """
    found: dict[str, str] = {}
    for field in policy.wishes:
        in_fp8 = field == "fp8_param"
        reason = without_fp8_weights(policy, strategy, processes) if in_fp8 else "only Megatron keeps them so"
        if reason is not None:
            found[field] = reason
    return found


def unsupported_fields(policy: Policy, targets: Iterable[str], strategy: str | None = None) -> list[str]:
    """Return the required fields that none of the targets of a run carries: the run cannot enforce them.

    A wish is not required: the run does without it, and reports that.
    """
    targets = tuple(targets)
    policy = policy.decided()
    guarded = bool(set(targets) & set(GUARDED_TARGETS))
    kept = fp8_weights(policy, strategy)
    never = {"fp8_param"} if guarded and policy.fp8_param and kept is None else set()
    if policy.master_dtype is not Dtype.FP32 and (strategy or "").startswith("deepspeed"):
        never.add("fp32_modules")  # DeepSpeed casts every parameter, and then nothing holds the exact values
    if policy.fp8_weight_cache and strategy in SHARDED_WEIGHTS:
        never.add("fp8_weight_cache")  # a copy would be of the whole model on each GPU
    converted = CONVERTER_FIELDS - never | ({"fp8_param"} if kept == "te" else set())
    missing = [
        (set(get(target).not_carried(policy, strategy)) | never) - (converted if target in GUARDED_TARGETS else set())
        for target in targets
    ]
    return [field for field in required_fields(policy, strategy) if all(field in each for each in missing)]


def require_supported(target: str, policy: Policy, strategy: str | None = None) -> None:
    """Raise `PolicyError` if a required field is carried by nothing in a run of this target.

    Other trainers decide the dtype of the reduction and of the master weights themselves: the config is written, and
    `Plugin.not_carried` has what it lacks.
    """
    targets = targets_of_run(target, policy, strategy)
    fields = unsupported_fields(policy, targets, strategy)
    if target not in GUARDED_TARGETS:
        fields = [field for field in fields if policy.explicit(field) and field != "grad_reduce_in_fp32"]
    if message := unsupported_message(policy, fields, targets):
        raise PolicyError(message)


def unsupported_message(policy: Policy, fields: Sequence[str], targets: Sequence[str]) -> str | None:
    """Return a message: the fields that a run cannot enforce, the targets that can, and how to do without them.

    fields: the result of `unsupported_fields`; returns None if it is empty.
    """
    if not fields:
        return None
    able = sorted({name for field in fields for name in carriers(field)} - set(targets))
    what = ", ".join(f"{field}={policy.format_field(field)}" for field in fields)
    by = f"only {', '.join(able)} can" if able else "no target can"
    if "fp8_weight_cache" in fields and set(targets) & set(GUARDED_TARGETS):
        by += " (with sharded weights a copy would be of the whole model on each GPU)"
    instead = "Take another recipe"
    if without := _without(policy, fields):
        options = " ".join(f"--override {each.replace(': ', '=')}" for each in without.split(", "))
        overrides = f"mpguard_overrides: {{{without}}}" if set(targets) & set(GUARDED_TARGETS) else options
        instead = f"To go without: {overrides}"
    if "fp8_param" in fields and set(targets) & set(GUARDED_TARGETS):
        by += f" (here: {'; '.join(FP8_WEIGHTS.values())})"
        instead += f". {SAME_PRODUCTS}"
    if "fp32_modules" in fields and set(targets) & set(GUARDED_TARGETS):
        by = f"DeepSpeed casts all parameters to {policy.master_dtype}, and no FP32 master weights are kept"
    return f"`{policy.name}` has {what}, which a run of {', '.join(targets)} cannot put into force; {by}. {instead}"


def _without(policy: Policy, fields: Sequence[str]) -> str | None:
    """Return the fewest overrides that reset the fields to their defaults, as YAML; None if a field is required."""
    overrides: dict[str, str] = {}
    left = policy
    for field in fields:
        if not left.explicit(field):
            continue  # the change of another field has reset it
        default = Policy.__dataclass_fields__[field].default
        try:
            left = left.replace(**{field: default})
        except PolicyError:
            return None
        overrides[field] = show(default)
    return ", ".join(f"{field}: {value}" for field, value in overrides.items())
