"""Remarks: what a step shows that loses precision, or that a GPU refuses, whatever the policy is.

A remark ends nothing, and it is no part of the verdict: the run may be what the policy asks for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8.filters import is_converted, is_linear, is_torchao, plain_name
from mpguard.policy import speed
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.runtime.messages import with_page
from mpguard.runtime.proof import trees
from mpguard.runtime.proof.account import Products
from mpguard.runtime.proof.gradients import Gradients
from mpguard.runtime.proof.inferred import Inferred
from mpguard.runtime.proof.models import existing_optimizers
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.trace import FP8_MULTIPLE, Overflow

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpguard.runtime.proof.master_values import MasterValues

#: The names of modules, and those for messages, by their numbers.
Places = Mapping[int | None, tuple[str | None, str]]

#: The name of a buffer with the frequencies of rotary or sinusoidal positions, as transformers, GPT-NeoX and
#: x-transformers call it.
FREQUENCIES = re.compile(r"(.*_)?inv_freqs?$")

#: The dtypes of a step in which autocast, or FP8, is in force for all matmuls.
SHORT = {"bf16", "fp16", "fp8"}

#: The least share of the parameters that are frozen and FP32 for a remark about their memory.
FROZEN_SHARE = 0.5

#: Dtypes of 16 bits: their decimal digits, and the largest whole number up to which they have all.
DIGITS, EXACT = {"bf16": "2 to 3", "fp16": "3 to 4"}, {"bf16": 256, "fp16": 2048}
LOW = frozenset(DIGITS)

#: How a loss gets more digits, and the page about FP32 parts.
WITH_FLOAT, PAGE = "Compute it in FP32: `logits.float()` before it", "fp32"

#: A limit for clipping that is smaller than the loss scale by this factor was not multiplied by it: if it was, it would
#: clip gradients to 1/64.
LEAST_CLIPPED = 64

#: Names that a line lists.
LISTED = 3


@dataclasses.dataclass(frozen=True)
class Remark:
    """A line. key: a run has one of each. page: the rule, or the page of the documentation, that explains it."""

    key: str
    text: str
    page: str

    def __str__(self) -> str:
        return with_page(self.text, self.page)


def remarks(roots: list[nn.Module], products: Products, places: Places, policy: Policy) -> Iterator[Remark]:
    """Yield the remarks about a step of some models."""
    yield from _frequencies(roots)
    yield from overflows(products.overflows, products.called, places)
    yield from _unaligned(products, places)
    yield from _narrow(roots)
    yield from _head(roots, products, policy)
    yield from _frozen(roots, products, policy)


def sixteen_bits(recorded: Gradients, inferred: Inferred, optimizer: Any, device: str) -> Iterator[Remark]:
    """Yield a remark for each number that decides about a step and has 16 bits: the loss, what enters it, the norm.

    device: the device type of the model.
    """
    loss = short(recorded.loss.dtype) if recorded.loss is not None else ""
    probabilities = inferred.log_probabilities & LOW
    # Autocast for the CPU has a shorter list of functions in FP32.
    by_autocast = (
        " (autocast for the CPU leaves log_softmax in it, autocast for a GPU does not)" if device == "cpu" else ""
    )
    if loss in LOW:
        entering = f", and so are log-probabilities that enter it{by_autocast}" if loss in probabilities else ""
        yield Remark("loss", f"the loss is in {loss}, which has {DIGITS[loss]} digits{entering}. {WITH_FLOAT}", PAGE)
    for dtype in sorted(probabilities - {loss}):
        yield Remark(
            "log-probabilities",
            f"log-probabilities that enter the loss are in {dtype}, which has {DIGITS[dtype]} digits{by_autocast}: "
            f"ratios of probabilities (PPO, GRPO, DPO) are as coarse. {WITH_FLOAT}",
            PAGE,
        )
    if recorded.norm_dtype in LOW:
        yield Remark(
            "norm",
            f"the norm by which gradients are clipped is in {recorded.norm_dtype}, as they are: it has "
            f"{DIGITS[recorded.norm_dtype]} digits. Compute it from FP32 gradients",
            PAGE,
        )
    states = [state for state in getattr(optimizer, "state", {}).values() if isinstance(state, dict)]
    steps = {short(state["step"].dtype) for state in states if hasattr(state.get("step"), "dtype")}
    for dtype in sorted(steps & LOW):
        yield Remark(
            "step count",
            f"the optimizer counts its steps in {dtype}, as a checkpoint or a cast has left them: from step "
            f"{EXACT[dtype]} on the count, and the bias correction, stay the same. Load the states in FP32",
            PAGE,
        )


def suspicions(values: MasterValues, optimizer: Any, steps: int) -> Iterator[Remark]:
    """Yield remarks about weights that look rounded, without a witness. steps: of the optimizer in this process."""
    yield from _rounded(values.suspected.get(id(optimizer), {}), type(optimizer).__name__)
    yield from _put(values.put_in.get(id(optimizer)), type(optimizer).__name__)
    yield from resumed(values.began_in.get(id(optimizer)), optimizer, steps)


def _rounded(found: Mapping[str, int], optimizer: str) -> Iterator[Remark]:
    """Yield a remark if weights look rounded after a step. found: sampled weights by dtype."""
    for dtype, count in found.items():
        yield Remark(
            "rounded",
            f"{count} sampled FP32 weights have only values of {dtype} where the step of {optimizer} has changed "
            "them. By chance that is so about once in 2^24 steps. If the step rounds them, what the small dtype rounds "
            "away of each update is lost. It is not refused, because only the steps of torch's own optimizers, and of "
            "subclasses that call them, can be computed again and compared",
            "refused",
        )


def _put(dtype: str | None, optimizer: str) -> Iterator[Remark]:
    """Yield a remark if a script has given weights values of 16 bits, which are not those that a step has left."""
    if dtype:
        yield Remark(
            "put",
            f"between two steps the script has given all sampled FP32 weights of {optimizer} other values, which are "
            f"values of {dtype} only: an average, or slow weights, that are kept in {dtype}? What the steps add below "
            "its digits is lost. Keep that copy in FP32",
            "refused",
        )


def resumed(dtype: str | None, optimizer: Any, steps: int) -> Iterator[Remark]:
    """Yield a remark if the weights of an optimizer that has gone on from a checkpoint had values of 16 bits.

    dtype: that of all sampled values before the step; None if there is none. steps: of the optimizer in this process.
    """
    states = (state for state in getattr(optimizer, "state", {}).values() if isinstance(state, dict))
    count = next((float(state["step"]) for state in states if "step" in state), 0.0) if dtype else 0.0
    if count > steps:
        yield Remark(
            "resumed",
            f"after {count - 1:.0f} steps, as its states count them, the FP32 weights of {type(optimizer).__name__} "
            f"began this run with values of {dtype} only: they were made from weights in {dtype}, and what they had "
            "accumulated below its digits is lost. Save the FP32 weights with the states, and load both",
            PAGE,
        )


def clipped_while_scaled(scale: float, limit: float) -> Remark | None:
    """Return a remark if gradients are clipped while they are scaled, unless the limit may be scaled as well."""
    if limit * LEAST_CLIPPED > scale:
        return None
    return Remark(
        "clipped",
        f"gradients that are still multiplied by the loss scale ({scale:g}) are clipped to {limit:g}, "
        f"which is {limit / scale:.2g} after the division. Call `scaler.unscale_(optimizer)` before, or multiply the "
        "limit by the scale",
        "MPG205",
    )


def _frequencies(roots: list[nn.Module]) -> Iterator[Remark]:
    """Frequencies that a cast of the whole model has rounded: an angle is a position times a frequency."""
    found = [
        (plain_name(name), own)
        for root in roots
        for name, own in root.named_buffers()
        if FREQUENCIES.match(name.rpartition(".")[2]) and own.numel() > 1 and _is_short(own)
    ]
    if found:
        dtype = Dtype.of(found[0][1].dtype)
        assert dtype is not None
        names = _listed([f"`{name}`" for name, _ in found])
        yield Remark(
            "frequencies",
            f"{names} {'are' if len(found) > 1 else 'is'} {dtype.short}: the angle of position p is wrong by up to p x "
            f"{dtype.eps / 2:.2g}. A cast of the whole model casts its buffers, and so does the `buffer_dtype` of "
            "FSDP: keep frequencies in FP32, or compute them again in FP32 where they are used",
            "MPG616",
        )


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def overflows(found: Iterable[Overflow], called: Mapping[int, str] | None, places: Places) -> Iterator[Remark]:
    """Yield the remarks about finite numbers that became infinite. called: the classes of modules, by their numbers."""
    by_value: dict[tuple[float, str], list[int | None]] = {}
    for each in found:
        by_value.setdefault((each.value, each.dtype), []).append(each.module)
    for (value, dtype), modules in sorted(by_value.items()):
        yield Remark(
            f"overflow {value:g}",
            f"{_place(modules, called, places)}: `torch.where` writes {value:g} into a tensor in {dtype}, where it is "
            "infinite; a row that is masked as a whole then gives NaN in a softmax. Take "
            "`torch.finfo(tensor.dtype).min`, or compute it in FP32",
            "MPG601",
        )


def _unaligned(products: Products, places: Places) -> Iterator[Remark]:
    """FP8 matmuls that the kernels of GPUs refuse, and emulation does not."""
    if products.unaligned:
        rows = _listed([str(each) for each in sorted({each.rows for each in products.unaligned})])
        place = _place([each.module for each in products.unaligned], products.called, places)
        yield Remark(
            "rows",
            f"{place}: {rows} rows (batch x sequence length) in FP8. The gradient of the weight sums over them, and "
            f"the FP8 kernels of GPUs need a multiple of {FP8_MULTIPLE}: pad the batch, or leave the layer out of FP8. "
            "Layers that mpguard converts pad by themselves",
            "MPG404",
        )


def _narrow(roots: list[nn.Module]) -> Iterator[Remark]:
    """FP8 layers that the script has made, and that are slower than BF16 ones with any number of tokens."""
    layers: list[Any] = [
        module
        for root in roots
        for module in trees.modules(root)
        if is_linear(module) and is_torchao(module) and not is_converted(module)
    ]
    prediction = speed.at_best("torchao", ((each.in_features, each.out_features) for each in layers))
    if prediction is not None and prediction.ratio < 1:
        yield Remark(
            "narrow",
            f"BF16 would be faster than the FP8 of {len(layers)} layers: {prediction}. Leave narrow layers out of the "
            "conversion, or train in BF16",
            "fp8",
        )


def _head(roots: list[nn.Module], products: Products, policy: Policy) -> Iterator[Remark]:
    """An output head in FP8 that shows in what the step computed: neither its size nor its name told before."""
    for name, module in [] if policy.fp8_head else [each for root in roots for each in trees.named_modules(root)]:
        if is_converted(module) and id(module._parameters.get("weight")) in products.inferred.heads:
            own = plain_name(name)
            yield Remark(
                "head",
                f"`{own}` is in FP8, and an output head: of all layers, its result alone becomes log-probabilities. "
                f"Neither its size nor its name told so before the step. Keep it in {policy.compute_dtype.short} "
                f'(`fp8_exclude: ["{own}", ...]`), or accept it: `fp8_head: true`',
                "fp8",
            )


def _frozen(roots: list[nn.Module], products: Products, policy: Policy) -> Iterator[Remark]:
    """Frozen weights in FP32, where all matmuls are of 16 bits or fewer: autocast rounds them for each."""
    import torch

    dtype, ran = policy.params_dtype, {work.dtype for work in (*products.trained, *products.frozen)}
    if dtype is None or dtype.bits != 16 or not ran or not ran <= SHORT:
        return
    own = list({id(each): each for root in roots for each in trees.parameters(root)}.values())
    sharded = any(hasattr(each, "ds_numel") or hasattr(each, "device_mesh") for each in own)
    flat = any(type(module).__name__ == "FullyShardedDataParallel" for root in roots for module in trees.modules(root))
    frozen = [each for each in own if not each.requires_grad and each.dtype is torch.float32]
    total = sum(each.numel() for each in own)
    if sharded or flat or sum(each.numel() for each in frozen) <= FROZEN_SHARE * total:
        return
    # A GAN that freezes one of its networks in the step of the other one trains both.
    groups = [group for optimizer in existing_optimizers() for group in optimizer.param_groups]
    trained = {id(each) for group in groups for each in group["params"]}
    wide = sum(each.numel() for each in frozen if id(each) not in trained)
    if wide > FROZEN_SHARE * total:
        yield Remark(
            "frozen",
            f"{100 * wide / total:.0f} % of the parameters are frozen and FP32. No optimizer updates them, and "
            f"autocast casts them to {dtype.short} for each matmul. If they are never trained, and nothing is "
            f"merged into them, load them in {dtype.short} (`dtype={dtype.torch}`): it halves their memory, and saves "
            "the casts",
            "refused",
        )


def _place(modules: Collection[int | None], called: Mapping[int, str] | None, places: Places) -> str:
    """Return modules as a message names them."""
    known = called or {}
    names = set()
    for module in modules:
        if module in places:
            names.add(places[module][1])
        elif module is not None and module in known:
            names.add(f"a {known[module]}")
        else:
            names.add("code outside of modules")
    return _listed(sorted(names))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
