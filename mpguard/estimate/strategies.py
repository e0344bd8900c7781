"""What each strategy keeps on one GPU: parameters, gradients, master weights, optimizer states, buffers.

Each is a function of the weights, and counts as the libraries do: with their padding, and the tensors that rank 0 has,
which are the largest. tests/estimate compares with FSDP2 and DeepSpeed ZeRO.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from mpguard.estimate.optimizers import Optimizer, Owned
from mpguard.estimate.tape import FULL, HALF
from mpguard.estimate.weights import Weight
from mpguard.policy import Dtype, Policy

#: DeepSpeed's defaults, in elements (deepspeed/runtime/zero/config.py).
REDUCE_BUCKET, PREFETCH, PERSISTENT, MOST_ALIVE = 500_000_000, 50_000_000, 100_000, 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Shares:
    """What stays on one GPU, in bytes.

    resident: the gradients exist during the whole step, not only after the backward pass. kept: bytes of a gradient
    that stay after the backward pass of its block. forward, backward: buffers that exist in that phase. step: what the
    optimizer needs while it steps. host: what is in the memory of the host instead.
    """

    parameters: int
    gradients: int
    master_weights: int
    optimizer: int
    step: int
    kept: Callable[[Weight], int] | None = None
    resident: bool = False
    forward: int = 0
    backward: int = 0
    host: int = 0

    @property
    def states(self) -> int:
        """What stays for the whole run."""
        return self.parameters + self.master_weights + self.optimizer + (self.gradients if self.resident else 0)


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """What a strategy needs to know: the policy, how many GPUs, the optimizer, and if it is on the host."""

    policy: Policy
    gpus: int
    optimizer: Optimizer
    offload: bool = False

    @property
    def trained(self) -> int:
        """Bytes of an element of the parameters that the optimizer updates."""
        return self.policy.master_dtype.bits // 8

    @property
    def engine(self) -> int:
        """Bytes of an element of the compute copy of the parameters."""
        assert self.policy.params_dtype is not None
        return self.policy.params_dtype.bits // 8

    @property
    def separate(self) -> bool:
        """True if parameters and gradients are in the compute dtype, and the optimizer has masters."""
        return self.policy.master_weights == "optimizer"

    @property
    def reduced(self) -> int:
        """Bytes of an element of the gradients while they are reduced."""
        return self.policy.reduce_dtype.bits // 8


def single(weights: Sequence[Weight], plan: ShardingPlan) -> Shares:
    """One process: everything on its GPU."""
    owned = [Owned(each.shape, plan.trained, each.kind) for each in weights]
    count = sum(each.count for each in weights)
    size = count * (plan.engine if plan.separate else plan.trained)
    masters = count * plan.trained if plan.separate else 0
    return Shares(size, size, masters, sum(map(plan.optimizer.state, owned)), plan.optimizer.step(owned))


def ddp(weights: Sequence[Weight], plan: ShardingPlan) -> Shares:
    """A copy on each GPU, and DDP's buckets, which are a second copy of the gradients."""
    shares = single(weights, plan)
    return dataclasses.replace(shares, forward=shares.gradients, backward=shares.gradients)


def _units(weights: Sequence[Weight]) -> dict[int | None, list[Weight]]:
    """Return the weights by FSDP unit: a block each, and the root."""
    found: dict[int | None, list[Weight]] = defaultdict(list)
    for each in weights:
        found[each.block].append(each)
    return found


def _gathered(weights: Sequence[Weight], plan: ShardingPlan) -> tuple[int, int]:
    """Return FSDP's buffers forward and backward: two gathered blocks and the root; backward two reductions as well."""
    units = {block: sum(each.count for each in found) for block, found in _units(weights).items()}
    root = units.pop(None, 0)
    largest = max(units.values(), default=0)
    forward = (root + 2 * largest) * plan.engine
    return forward, forward + (largest + max(largest, root)) * plan.reduced


def fsdp2(weights: Sequence[Weight], plan: ShardingPlan) -> Shares:
    """Each parameter is split along its first dimension; the first rank has the largest part."""
    parts = {each: (math.ceil((each.shape or (1,))[0] / plan.gpus), *each.shape[1:]) for each in weights}
    owned = [Owned(parts[each], plan.trained, each.kind) for each in weights]
    return _fsdp(weights, plan, owned, lambda weight: math.prod(parts[weight]) * plan.trained)


def fsdp1(weights: Sequence[Weight], plan: ShardingPlan) -> Shares:
    """The parameters of a unit are one flat tensor, padded and split."""
    owned = [
        Owned((math.ceil(sum(each.count for each in found) / plan.gpus),), plan.trained, "vector")
        for found in _units(weights).values()
    ]
    return _fsdp(weights, plan, owned, lambda weight: weight.count * plan.trained // plan.gpus)


def _fsdp(
    weights: Sequence[Weight], plan: ShardingPlan, owned: Sequence[Owned], kept: Callable[[Weight], int]
) -> Shares:
    size = sum(each.count * each.width for each in owned)
    state = sum(map(plan.optimizer.state, owned))
    forward, backward = _gathered(weights, plan)
    if plan.offload:
        return Shares(0, 0, 0, 0, 0, lambda _: 0, False, forward, backward, 2 * size + state)
    return Shares(size, size, 0, state, plan.optimizer.step(owned), kept, False, forward, backward)


def _flat(weights: Sequence[Weight], plan: ShardingPlan) -> int:
    """Return the elements of DeepSpeed's flat tensor, which is padded to twice the number of GPUs."""
    return math.ceil(sum(each.count for each in weights) / (2 * plan.gpus)) * 2 * plan.gpus


def zero12(weights: Sequence[Weight], plan: ShardingPlan, stage: int) -> Shares:
    """ZeRO-1 and ZeRO-2. With FP32 accumulation in BF16, stage 1 is `BF16_Optimizer`, which keeps all gradients."""
    flat = _flat(weights, plan)
    part = flat // plan.gpus
    owned = [Owned((part,), plan.trained, "vector")]
    state = sum(map(plan.optimizer.state, owned))
    whole = stage == 1 and plan.policy.bf16 and plan.engine == HALF and _accumulated(plan) == FULL
    compact = _accumulated(plan) == FULL and plan.engine < FULL
    gradients = (flat if whole else part if compact else _touched(weights, part)) * _accumulated(plan)
    master = part * plan.trained
    bucket = 0 if whole else REDUCE_BUCKET * plan.engine
    shares = Shares(
        flat * plan.engine, gradients, master, state, plan.optimizer.step(owned), _nothing, whole, 0, bucket
    )
    return _on_host(shares, plan, gradients if whole else 0)


def _touched(weights: Sequence[Weight], part: int) -> int:
    """Return the elements of the gradients that rank 0 keeps if each stays as it is: the last one is kept whole.

    Norms are the last parameters of a block in transformers' decoders.
    """
    count = 0
    for _, found in itertools.groupby(weights, key=lambda weight: weight.block):
        for each in sorted(found, key=lambda weight: "norm" in weight.name and weight.block is not None):
            if count >= part:
                return count
            count += each.count
    return count


def _accumulated(plan: ShardingPlan) -> int:
    """Return the bytes of an element of the gradients that DeepSpeed keeps."""
    return plan.reduced if plan.trained == FULL else plan.engine


def _nothing(_: Weight) -> int:
    return 0


def _on_host(shares: Shares, plan: ShardingPlan, gradients: int) -> Shares:
    """Move master weights, gradients and optimizer states to the host, if that is planned."""
    if not plan.offload:
        return shares
    host = shares.master_weights + shares.optimizer + shares.gradients - gradients
    return dataclasses.replace(shares, master_weights=0, optimizer=0, gradients=gradients, step=0, host=host)


def zero3(weights: Sequence[Weight], plan: ShardingPlan) -> Shares:
    """ZeRO-3: parameters are split too; small ones stay gathered, and others while they are used."""
    part = sum(math.ceil(each.count / plan.gpus) for each in weights)
    owned = [Owned((part,), plan.trained, "vector")]
    state = sum(map(plan.optimizer.state, owned))
    small = sum(each.count for each in weights if each.count <= PERSISTENT)
    units = [sum(each.count for each in found) for found in _units(weights).values()]
    alive = min(max(units, default=0) + PREFETCH, MOST_ALIVE, sum(units))
    gathered = (small + alive) * plan.engine + REDUCE_BUCKET * plan.reduced
    gradients = part * _accumulated(plan)
    step = plan.optimizer.step(owned)
    master = part * plan.trained
    shares = Shares(part * plan.engine, gradients, master, state, step, _nothing, True, gathered, gathered)
    return _on_host(shares, plan, 0)


Keeping = Callable[[Sequence[Weight], ShardingPlan], Shares]

STRATEGY: Mapping[str, Keeping] = {
    "single": single,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "deepspeed-zero1": lambda weights, plan: zero12(weights, plan, 1),
    "deepspeed-zero2": lambda weights, plan: zero12(weights, plan, 2),
    "deepspeed-zero3": zero3,
}


def weight_bytes(policy: Policy, strategy: str) -> int:
    """Return the bytes of an element of the parameters that the forward pass sees."""
    if strategy in ("single", "ddp") and policy.master_weights == "model":
        return policy.master_dtype.bits // 8
    assert policy.params_dtype is not None
    return HALF if policy.params_dtype is not Dtype.FP32 else FULL
