"""Why matmuls and weights are in another dtype, as far as it was read: for the advice of a refusal.

Where the cause was not read, the advice names what must hold, and no cause.
"""

from __future__ import annotations

from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.runtime.proof.autocast_regions import EnteredRegion
from mpguard.runtime.proof.frameworks import precision_advice
from mpguard.runtime.proof.observe import Observed

#: What must hold, where nothing is known about the autocast regions of a step.
NOT_IN_FORCE = "Autocast (or the engine) was not in force around the forward pass: run the forward pass inside it"


def not_cast(seen: Observed, policy: Policy) -> str:
    """Return what to do where no matmul is in the policy's 16 bits."""
    if seen.autocast is None or seen.compiled:  # compiled code enters no region when it runs
        return precision_advice(policy) or NOT_IN_FORCE
    regions, wanted = seen.autocast.regions, region_for(seen, policy.compute_dtype)
    here = [each for each in regions if each.device == seen.device]
    if any(each.enabled for each in here):
        return _outside(seen)
    if known := precision_advice(policy):
        return known
    if regions and not here:
        return f"{_entered(regions)} casts nothing on the device of the model, {seen.device}: write `{wanted}`"
    if around := [each for each in here if not each.in_module]:
        return f"{_entered(around)} is switched off (`enabled=False`): enable it around the forward pass"
    return f"No autocast region was entered around the forward pass: run it inside of `{wanted}`"


def _outside(seen: Observed) -> str:
    """Return what to do about matmuls that ran outside of the regions in which autocast was on."""
    assert seen.autocast is not None
    entered = _entered([each for each in seen.autocast.regions if each.enabled and each.device == seen.device])
    if seen.autocast.in_other_threads:
        return (
            f"{entered} holds in the thread that has entered it, and modules were called in another one: enter it in "
            "the function that this thread runs"
        )
    return (
        f"{entered} was entered, and was not in force where these matmuls ran: run the whole forward pass inside it, "
        "and switch autocast off nowhere in it"
    )


def other_sixteen_bits(seen: Observed, policy: Policy, found: str) -> str:
    """Return what to do where matmuls are in 16 bits that the policy does not ask for. found: their dtype."""
    asked = policy.compute_dtype
    regions = seen.autocast.regions if seen.autocast is not None else []
    of_found = [each for each in regions if each.enabled and each.dtype == found and each.device == seen.device]
    if not of_found:
        return f"Remove the cast to {found} there (of weights or of activations), or choose a policy of that dtype"
    if asked is Dtype.FP32:
        return f"{_entered(of_found)} was entered: remove it, or choose a policy of {found}"
    default = " (without `dtype` it is bf16 on a CPU)" if (seen.device, found) == ("cpu", "bf16") else ""
    write = f"pass dtype=torch.{asked.torch_name}{default}"
    return f"{_entered(of_found)} was entered: {write}, or choose a policy of {found}"


def weights_in_fp32(seen: Observed) -> str:
    """Return how to have FP32 weights."""
    if seen.cast:
        return f"remove the cast ({seen.cast})"
    if seen.pretrained:
        return (
            "load the model in fp32 (`from_pretrained(NAME, dtype=torch.float32)`: transformers 5 loads a checkpoint "
            "in the dtype it was saved in)"
        )
    if seen.default_dtype in ("bf16", "fp16"):
        return f"set torch's default dtype, which is {seen.default_dtype}, to torch.float32 before the model is created"
    return "create and load them in fp32"


def region_for(seen: Observed, dtype: Dtype) -> str:
    """Return the autocast region that computes in a dtype."""
    return f'torch.autocast("{seen.device}", dtype=torch.{dtype.torch_name})'


def _entered(regions: list[EnteredRegion]) -> str:
    """Return the first of some regions, as code."""
    first = regions[0]
    dtype = Dtype.spelled(first.dtype)
    return f'`torch.autocast("{first.device}", dtype=torch.{dtype.torch_name if dtype is not None else first.dtype})`'
