"""What to do about an event, in the words of mp.yaml."""

from __future__ import annotations

import re
from collections.abc import Collection

from mpguard.policy.policy import Policy

#: The scale that a GradScaler begins with by default.
USUAL_SCALE = 65536.0


def for_module(
    module: str,
    policy: Policy | None,
    names: Collection[str],
    *,
    overflowed: bool,
    in_fp32: bool = False,
    phase: str = "forward",
    between: bool = False,
) -> str:
    """Return what to do about a module whose results are not finite.

    names: all modules of the model. overflowed: True if it made infinities, not NaN. in_fp32: True if FP32 would not
    help, or if it computed in that. phase: forward or backward. between: True if its own code made them, between calls
    of other modules.
    """
    if in_fp32 and phase == "backward":
        # The module's results are in FP32; a factor of its own may be in FP16, as in `scale.to(x.dtype) * x`.
        fp16 = policy is not None and policy.fp16
        dtypes = "and BF16 where a gradient exceeds 65504 in FP16" if fp16 else "another dtype does not"
        return (
            f"check `{module}` for sqrt(0), a norm of zeros, log(0) and 1/0, whose gradients are infinite, and for a "
            f"learning rate that is too high; an epsilon or clipping helps, {dtypes}"
        )
    if in_fp32:
        nan = (
            "0/0, log(0), sqrt(0) and a softmax over rows that are all masked" if between else "0/0, log(0) and sqrt(0)"
        )
        cause = "log(0), 1/0 and exp of a large number" if overflowed else nan
        return f"check `{module}` for {cause}; an epsilon or a bound helps, another dtype does not"
    if policy is not None and policy.low_bit_recipe is not None:
        return f"keep `{module}` out of FP8: {_out_of_fp8(module, names)}"
    if policy is None or not policy.low_precision:
        if overflowed:
            return f"compute `{module}` in FP32 (`with torch.autocast(..., enabled=False)`), or bound its inputs"
        return f"check `{module}` for 0/0, log(0), sqrt(0) and a learning rate that is too high"
    own = f'compute `{module}` in FP32: mpguard_overrides: {{fp32_modules: ["{module}"]}}'
    if policy.fp16:
        return f"{own}, or use BF16, whose range is that of FP32: mpguard_recipe: bf16_mixed"
    return own if overflowed else f"{own}; if it stays, check it for 0/0, log(0) and sqrt(0)"


def for_overflow(module: str, policy: Policy | None, names: Collection[str], dtype: str, weights: str) -> str:
    """Return what to do about a module whose results are finite in FP32, and not in the dtype that computed them."""
    if policy is not None and module in names:
        own = f'compute `{module}` in FP32: mpguard_overrides: {{fp32_modules: ["{module}"]}}'
    else:
        own = f"compute `{module}` in FP32 (`with torch.autocast(..., enabled=False)` around it)"
        if weights == "float32" and policy is not None:
            own += ": its weights in FP32 do not make autocast compute it so"
    if dtype == "float16":
        recipe = "train in BF16, whose range is that of FP32"
        return f"{own}, or {recipe}{': mpguard_recipe: bf16_mixed' if policy is not None else ''}"
    return own


def _out_of_fp8(module: str, names: Collection[str]) -> str:
    """Return the setting that keeps a module out of FP8: the last layers have one of their own."""
    found = re.match(r"(.*?\.)?(\d+)(\.|$)", module)
    if found:
        prefix, number = found[1] or "", int(found[2])
        same = re.compile(re.escape(prefix) + r"(\d+)(\.|$)")
        last = max((int(other[1]) for name in names if (other := same.match(name))), default=number)
        if number == last and prefix:
            return "mpguard_overrides: {first_last_layers_bf16: true, num_layers_at_end_in_bf16: 1}"
    return f'mpguard_overrides: {{fp8_exclude: ["{module}"]}}'


#: What to do about what was seen after its step was applied.
FOR_LATE = "run it again from the last checkpoint with `--watch full`, which checks each step before it is applied"


def for_loss(dtype: str = "", *, backward: bool = False) -> str:
    """Return what to do about a loss that is not finite although the model's outputs are. dtype: of these outputs.

    backward: the loss is finite, and its gradient is not.
    """
    if backward:
        check = "check it for sqrt(0), a norm of zeros, log(0) and 0/0, whose gradients are infinite"
    else:
        check = "check it for log(0), 0/0, labels that are all ignored, and NaN in the targets"
    if dtype != "float16":
        return f"{check}; an epsilon helps, another dtype does not"
    return f"compute the loss in FP32 (`logits.float()`): FP16 ends at 65504; else {check}"


def for_batch(dtype: str) -> str:
    """Return what to do about inputs that are not finite. dtype: of the inputs."""
    if dtype not in ("float16", "bfloat16"):
        return "check the data: the batch itself has NaN or Inf"
    kind = "FP16" if dtype == "float16" else "BF16"
    return (
        f"check the data, or what computed it in {kind}: compute an encoder (a VAE) that runs before the model under "
        "autocast in FP32 (`with torch.autocast(..., enabled=False)` around it)"
    )


def for_buffers(module: str, buffers: Collection[str]) -> str:
    """Return what to do about buffers that are not finite: statistics of a batch norm that took a bad batch."""
    names = ", ".join(buffers)
    return (
        f"{names} of `{module}` took NaN or Inf from an earlier batch, or was loaded so: load the last checkpoint, or "
        "reset it (`reset_running_stats()` of a batch norm)"
    )


def for_unknown() -> str:
    """Return what to do about a loss that is not finite, where no module could be named."""
    return (
        "check that all weights were initialized (after `to_empty`, too), the batch, and the loss for log(0) and 0/0; "
        "a run in one process, without sharding, names the module"
    )


def for_huge(what: str, largest: float) -> str:
    """Return what to do about values near the end of the range of FP32: no operation made them by itself."""
    return (
        f"{what} are up to {largest:.2g}: check the batch and the initialization of the weights, lower the learning "
        "rate, or clip gradients; neither an epsilon nor another dtype helps"
    )


def for_weights(module: str, *, trained: bool = True) -> str:
    """Return what to do about weights that are not finite. trained: False before the first step."""
    if not trained:
        return (
            f"the weights of `{module}` are not finite before the first step: check their initialization (`to_empty` "
            "leaves them as the memory was), and the checkpoint that was loaded"
        )
    return (
        f"the weights of `{module}` are not finite: load the last checkpoint, and run it with `--watch full`, which "
        "checks each step before it is applied; weights in FP16 need FP32 ones for the optimizer: Adam's eps is 0 there"
    )


def for_skips(policy: Policy | None, scaled: bool, scale: float | None = None) -> str:
    """Return what to do about a loss scale that collapses, or steps that are skipped without a loss scale."""
    if scaled and scale is not None and scale > USUAL_SCALE:
        return f"the scale began too high, and is halved until gradients fit: give a lower one, such as {USUAL_SCALE:g}"
    if scaled:
        return (
            "gradients overflow at any scale: use BF16 (mpguard_recipe: bf16_mixed), or compute the module that "
            "overflows in FP32 (fp32_modules); `--watch full` names it"
        )
    fp8 = policy is not None and policy.low_bit_recipe is not None
    return (
        "without a loss scale a skipped step means NaN or Inf in the gradients: run with `--watch full`, which names "
        f"the module{', and keep it out of FP8 (fp8_exclude)' if fp8 else ''}"
    )


def for_jump() -> str:
    """Return what to do about a jump of the gradient norm."""
    return "clip gradients (`clip_grad_norm_(parameters, 1.0)`), and check this step's data"


def for_divergence(policy: Policy | None) -> str:
    """Return what to do about a loss that diverges."""
    if policy is not None and policy.low_bit_recipe is not None:
        return "repeat the steps with mpguard_recipe: bf16_mixed from the last checkpoint: if that is stable, it is FP8"
    if policy is not None and policy.low_precision:
        return "lower the learning rate; repeat the steps with mpguard_recipe: fp32 to see if it is the precision"
    return "lower the learning rate, or warm it up longer"


def for_zeros(kind: str, scale: float | None) -> str:
    """Return what to do about gradients that are all zero. kind: the format that computed them."""
    loss = (
        "check for a loss that is detached or multiplied by 0, and for a cross entropy of one class, which is always 0"
    )
    return f"{_for_fp16_zeros(scale)}; else {loss}" if kind == "fp16" else loss


def for_dead(kind: str, scale: float | None) -> str:
    """Return what to do about modules whose gradients are all zero while others train."""
    dead = "check for ReLUs or gates after it that are always 0, and for a branch that is masked or multiplied by 0"
    return f"{_for_fp16_zeros(scale)}; else {dead}" if kind == "fp16" else dead


def _for_fp16_zeros(scale: float | None) -> str:
    scaler = (
        f"raise the loss scale, which is {scale:g}" if scale is not None else "scale the loss (torch.amp.GradScaler)"
    )
    return f"they may be below the smallest number of FP16: {scaler}, or use BF16"


def for_stuck() -> str:
    """Return what to do about weights that do not move."""
    return (
        "keep the weights that are updated in FP32 (load the model in FP32 and let autocast compute in BF16, or master "
        "weights in the optimizer), or raise the learning rate"
    )


def for_underflow(kind: str, module: str, policy: Policy | None, names: Collection[str], *, scaled: bool = True) -> str:
    """Return what to do about gradients that underflow the format that a run computes in. scaled: by a loss scale."""
    if kind == "fp16" and not scaled:
        return "scale the loss (torch.amp.GradScaler), or use BF16, which has the range of FP32"
    if kind == "fp16":
        return (
            "raise the loss scale (mpguard_overrides: {initial_loss_scale: ...}), or use BF16, which has the range of "
            "FP32: mpguard_recipe: bf16_mixed"
        )
    if kind == "e4m3":
        return 'take E5M2 for gradients: mpguard_overrides: {fp8: "hybrid"}'
    if policy is not None and policy.low_bit_recipe is not None:
        return f"keep `{module}` out of FP8: {_out_of_fp8(module, names)}"
    return for_module(module, policy, names, overflowed=False)


def for_saturation(module: str, names: Collection[str]) -> str:
    """Return what to do about values above the FP8 range of their scale."""
    return (
        "use current scaling, which cannot saturate (mpguard_recipe: bf16_with_fp8_current_scaling_mixed), a margin "
        f"(mpguard_overrides: {{fp8_margin: 1}}), or keep `{module}` out of FP8: {_out_of_fp8(module, names)}"
    )


def for_fp8_noise(layer: str, policy: Policy | None) -> str:
    """Return what to do about a layer whose output has too much noise in FP8."""
    finer = policy is not None and policy.fp8_recipe == "tensorwise" and policy.backend == "torchao"
    recipes = "rowwise, or none" if finer else "none"
    return (
        f"give it another recipe: mpguard_fp8_modules: [{{pattern: {layer}, recipe: {recipes}}}]; "
        "`mpguard sensitivity` measures what each format keeps"
    )


def for_scale_drift(module: str, names: Collection[str]) -> str:
    """Return what to do about values that grow, so that their scale leaves ever less to the small ones."""
    return (
        f"check for outliers that grow in `{module}` (a lower learning rate, weight decay), or keep it out of FP8: "
        f"{_out_of_fp8(module, names)}"
    )


def for_ranks_apart(sharded: bool) -> str:
    """Return what to do about ranks that are apart."""
    if sharded:
        return "check the data of that rank, and its device (ECC errors, another driver)"
    return (
        "replicas must have the same weights: check for a step, a seed or a parameter that only some ranks have, for "
        "`no_sync` around the last backward pass, and for a faulty device"
    )
