"""Put the parts together: from a model, a recipe and a strategy to the memory of one GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from mpguard.core.errors import ConfigError, PolicyError, did_you_mean
from mpguard.estimate.adapters import MARK, Adapters
from mpguard.estimate.blocks import Batch
from mpguard.estimate.families import record
from mpguard.estimate.gpus import MEMORY_MIB, architecture, memory_of
from mpguard.estimate.optimizers import OPTIMIZERS
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.replay import Replay, Step
from mpguard.estimate.strategies import STRATEGY, ShardingPlan, Shares, weight_bytes
from mpguard.estimate.tape import FULL, HALF, Tape, TapeDtypes
from mpguard.policy import Policy, hardware

#: Outside of torch's allocator: CUDA's context and the kernels of torch (758 MiB on an H200 with CUDA 13:
#: benchmarks/results/estimate.json); NCCL's channels with several GPUs (an estimate).
CONTEXT, NCCL = 760 * 1024**2, 512 * 1024**2
#: The least that the allocator needs for fragments, as a share of what it gives out (`trains_at` in
#: benchmarks/results/estimate.json).
FRAGMENTS = 0.1
#: cuBLAS's workspaces: one for the thread of the forward pass, one for autograd's (Hopper and newer; else 8.125 MiB).
WORKSPACES = {True: 2 * 32 * 1024**2, False: 2 * 8519680}

#: The keys of `per_gpu`, in order; `total` follows.
PARTS = (
    "parameters", "gradients", "master_weights", "optimizer", "activations", "logits", "buffers", "fp8", "context",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Request:
    """What to estimate. gpu: a name of `MEMORY_MIB`, for what depends on its generation, and for the largest batch."""

    config: ModelConfig
    policy: Policy
    strategy: str = "single"
    gpus: int = 1
    batch: int = 1
    length: int = 2048
    optimizer: str = "adamw"
    checkpointing: bool = False
    compiled: bool = False
    offload: bool = False
    gpu: str = "h100"
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGY:
            raise ConfigError(f"there is no strategy `{self.strategy}`{did_you_mean(self.strategy, STRATEGY)}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"there is no optimizer `{self.optimizer}`{did_you_mean(self.optimizer, OPTIMIZERS)}")
        for name in ("gpus", "batch", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; 1 or more is needed")
        if self.strategy == "single" and self.gpus > 1:
            raise ConfigError(f"strategy single has one process, not {self.gpus}. Use --strategy ddp, fsdp2, ...")
        if self.offload and self.strategy in ("single", "ddp"):
            raise ConfigError(
                f"strategy {self.strategy} cannot keep the optimizer on the host. Use --strategy fsdp1, fsdp2 or "
                "deepspeed-zero1 to -zero3 with --offload"
            )


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU.

    per_gpu: each part at its largest. moments: what is alive at the peak of the forward pass, of the backward pass and
    of the optimizer's step, by part. total: the largest of these sums, and the context. Gradients and activations are
    not all alive at once, so the total may be below the sum of `per_gpu`. largest: the largest tensor of a step.
    trained: the number of parameters that train.
    """

    request: Request
    parameters: int
    per_gpu: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    largest: int
    host: int = 0
    trained: int = 0

    @property
    def total(self) -> int:
        """The bytes that the GPU must have."""
        return self.allocated + self.per_gpu["context"]

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` reports."""
        return sum(self.moments[self.peak].values())

    @property
    def needed(self) -> int:
        """The bytes of a GPU on which it fits: with what the allocator loses to fragments.

        That is a tenth, or the largest tensor if it is more. A segment that was made for it is split for any smaller
        tensor (`should_split` of c10/cuda/CUDACachingAllocator.cpp), and while one is in it, it is neither given back
        nor large enough: then another segment of that size is needed.
        """
        return self.allocated + max(int(self.allocated * FRAGMENTS), self.largest) + self.per_gpu["context"]

    @property
    def peak(self) -> str:
        """The moment with the largest sum."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    def fits(self, gpu: str) -> bool:
        """True if a GPU has the memory that is needed."""
        return self.needed <= memory_of(gpu)

    def as_json(self) -> dict[str, Any]:
        """Return the estimate in the form of `--format json`."""
        return {
            "version": 1,
            "parameters": self.parameters,
            "trained": self.trained,
            "fits_on": {"gpu": self.request.gpu, "fits": self.fits(self.request.gpu), "needed": self.needed},
            "per_gpu": {**self.per_gpu, "total": self.total},
            "peak": self.peak,
            "moments": {name: dict(parts) for name, parts in self.moments.items()},
            "host": self.host,
            "fits": {gpu: self.fits(gpu) for gpu in MEMORY_MIB},
        }


def estimate(request: Request) -> MemoryEstimate:
    """Return the memory that a request takes on one GPU. Raises `ConfigError` and `PolicyError`."""
    plan = ShardingPlan(request.policy, request.gpus, OPTIMIZERS[request.optimizer], request.offload)
    tape = _tape(request)
    shares = _shares(request, tape, plan)
    copies = _take_copies(tape) if request.policy.fp8_weight_cache else 0
    step = Replay(tape, checkpointing=request.checkpointing, kept=shares.kept, compiled=request.compiled).run()
    return _summed(request, tape, shares, step, copies)


#: Strategies that split frozen weights too, and gather them block by block.
_SPLIT = ("fsdp1", "fsdp2", "deepspeed-zero3")


def _shares(request: Request, tape: Tape, plan: ShardingPlan) -> Shares:
    """Return what stays on a GPU. With adapters the base has no gradients, masters or states; it is stored as it is."""
    weights, adapters = list(tape.weights.values()), request.adapters
    keeping = STRATEGY[request.strategy]
    if adapters is None:
        return keeping(weights, plan)
    adapters.check(weights)
    compute = tape.precision.compute
    base = sum(adapters.stored(each, compute) for each in weights if MARK not in each.name)
    shares = keeping([each for each in weights if MARK in each.name], plan)
    if request.strategy not in _SPLIT:
        return dataclasses.replace(shares, parameters=shares.parameters + base)
    part = -(-base // request.gpus)
    gathered = keeping(weights, plan).forward
    on_host = request.offload and request.strategy != "deepspeed-zero3"
    return dataclasses.replace(
        shares,
        parameters=shares.parameters + (0 if on_host else part),
        host=shares.host + (part if on_host else 0),
        forward=gathered,
        backward=gathered + shares.backward - shares.forward,
    )


def _take_copies(tape: Tape) -> int:
    """Take the FP8 copies of weights from what passes save, because they stay. Returns their bytes."""
    copies = {each for op in tape.ops for each in op.saved if each.kind == "fp8"}
    size = sum(each.size for each in copies)
    for each in copies:
        each.size = 0
    return size


def _tape(request: Request) -> Tape:
    policy = request.policy
    weights = weight_bytes(policy, request.strategy)
    compute = HALF if policy.low_precision else FULL
    fp8 = _fp8_width(policy, request.gpu)
    blocks = _block_names(request.config) if fp8 or policy.fp8_experts else []
    chosen = functools.partial(_is_fp8, policy, blocks)
    experts = policy.fp8_experts and hardware.named(architecture(request.gpu)).lacks("grouped") is None
    batch = Batch(request.batch, request.length)
    return record(
        request.config,
        batch,
        TapeDtypes(
            weights,
            compute,
            fp8,
            chosen if fp8 else None,
            chosen if experts else None,
            row=0 if request.compiled else request.length,
            cuda=True,
            adapters=request.adapters,
        ),
        request.compiled,
    )


def _fp8_width(policy: Policy, gpu: str) -> int:
    """Return the bytes that Transformer Engine saves for an element of a weight; 0 with torchao, or without FP8.

    Up to Hopper, and on consumer GPUs, FP8 matmuls need the weight transposed too.
    """
    recipe = policy.low_bit_recipe
    taken = policy.backends[:1] if recipe == "blockwise" else policy.backends  # torchao's is taken without another only
    if recipe is None or ("torchao" in taken and not policy.fp8_weight_cache):
        return 0
    capability = hardware.named(architecture(gpu)).capability or (9, 0)
    plain = (10, 0) <= capability < (12, 0)
    return 1 if plain and not recipe.startswith(("mxfp8", "nvfp4")) else 2


def _block_names(config: ModelConfig) -> list[str]:
    """Return the names of the blocks, in order."""
    names = (name.rpartition(".")[0] for name in _weights(config))
    return list(dict.fromkeys(_block(name) for name in names if _block(name)))


def _weights(config: ModelConfig) -> Iterator[str]:
    tape = record(config, Batch(1, 1))
    return (name for name, weight in tape.weights.items() if weight.block is not None)


def _block(name: str) -> str:
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _is_fp8(policy: Policy, blocks: list[str], name: str, inputs: int, outputs: int) -> bool:
    """True if a Linear layer becomes FP8: sizes are multiples of 16, and neither name nor block is kept out."""
    if inputs % 16 or outputs % 16 or any(fnmatch(name, pattern) for pattern in policy.kept_out_of_fp8):
        return False
    if not policy.first_last_layers_bf16:
        return True
    start, end = policy.num_layers_at_start_in_bf16, policy.num_layers_at_end_in_bf16
    return _block(name) not in (*blocks[:start], *(blocks[-end:] if end else ()))


def _summed(request: Request, tape: Tape, shares: Shares, step: Step, copies: int) -> MemoryEstimate:
    """Add what stays to what a step needs, at each of its moments. copies: bytes of FP8 copies of weights."""
    capability = hardware.named(architecture(request.gpu)).capability or (9, 0)
    fixed = WORKSPACES[capability >= (9, 0)] + sum(tape.frozen.values()) + _inputs(request, tape)
    stays = Counter({
        "parameters": shares.parameters, "master_weights": shares.master_weights, "optimizer": shares.optimizer,
        "gradients": shares.gradients if shares.resident else 0, "buffers": fixed, "fp8": copies,
    })  # fmt: skip
    forward = stays + _by_part(step.forward.kinds) + Counter(buffers=shares.forward)
    backward = stays + _by_part(step.backward.kinds) + Counter(buffers=shares.backward)
    after = stays + Counter(buffers=shares.step + (shares.forward if request.strategy == "ddp" else 0))
    after["gradients"] = shares.gradients
    moments = {"forward": forward, "backward": backward, "step": after}
    largest = {name: max(moment[name] for moment in moments.values()) for name in PARTS}
    per_gpu = {
        **largest,
        "gradients": shares.gradients,
        "activations": _by_part(step.between.kinds)["activations"],
        "context": CONTEXT + (NCCL if request.strategy != "single" else 0),
    }
    count = sum(each.count for each in tape.weights.values())
    trained = sum(each.count for each in tape.weights.values() if request.adapters is None or MARK in each.name)
    ordered = {name: {part: parts[part] for part in PARTS if part != "context"} for name, parts in moments.items()}
    return MemoryEstimate(request, count, per_gpu, ordered, step.largest, shares.host, trained)


def _by_part(kinds: Mapping[str, int]) -> Counter[str]:
    """Return bytes by the parts of an estimate. Copies of weights in the compute dtype are buffers."""
    names = {"activation": "activations", "logits": "logits", "copy": "buffers", "fp8": "fp8", "gradient": "gradients"}
    return Counter({names[kind]: size for kind, size in kinds.items() if size > 0})


def _inputs(request: Request, tape: Tape) -> int:
    """Return the bytes of the batch: what a model reads, and its labels."""
    read = {value.storage for op in tape.ops for value in op.inputs if value.storage.kind == "input"}
    return sum(storage.size for storage in read) + request.batch * request.length * 8


def largest_batch(request: Request) -> int:
    """Return the largest batch per GPU that fits on `request.gpu`; 0 if none does."""

    def fits(batch: int) -> bool:
        return estimate(dataclasses.replace(request, batch=batch)).fits(request.gpu)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= 2**16 and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):  # to 2 %: more would be false precision
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_fits(request: Request) -> list[str]:
    """Return options, each as it is written on the command line, with any of which a request fits on its GPU."""
    change = dataclasses.replace
    tried: list[tuple[str, Request]] = []
    if not request.checkpointing:
        tried.append(("--checkpointing", change(request, checkpointing=True)))
    for optimizer in ("adamw-fused", "adamw8bit"):
        if request.optimizer in ("adamw", "adamw-fused") and request.optimizer != optimizer:
            tried.append((f"--optimizer {optimizer}", change(request, optimizer=optimizer)))
            if not request.checkpointing:
                both = change(request, optimizer=optimizer, checkpointing=True)
                tried.append((f"--optimizer {optimizer} --checkpointing", both))
    if request.batch > 1:
        tried.append(("--batch 1", change(request, batch=1)))
    if request.adapters is None:
        tried.append(("--lora 16 --checkpointing", change(request, adapters=Adapters(16), checkpointing=True)))
    if request.adapters is None or request.adapters.quantize is None:
        adapters = change(request.adapters or Adapters(16), quantize="nf4")
        text = "--quantize nf4" if request.adapters else "--lora 16 --quantize nf4 --checkpointing"
        tried.append((text, change(request, adapters=adapters, checkpointing=True)))
    for gpus in (2, 4, 8, 16):
        if gpus > request.gpus and request.strategy in ("single", "ddp", "fsdp2"):
            more = change(request, gpus=gpus, strategy="fsdp2", checkpointing=True)
            tried.append((f"--gpus {gpus} --strategy fsdp2 --checkpointing", more))
    found: list[str] = []
    for text, each in tried:
        contained = any(set(other.split()) <= set(text.split()) for other in found)
        several = "--gpus" in text and any("--gpus" in other for other in found)
        try:
            if not contained and not several and estimate(each).fits(request.gpu):
                found.append(text)
        except (ConfigError, PolicyError):
            continue
    return found


def fitting(request: Request) -> dict[str, list[str]]:
    """Return, for each strategy, the GPUs on which the request fits."""
    found: dict[str, list[str]] = {}
    for strategy in STRATEGY:
        if (strategy == "single") != (request.gpus == 1) and not (strategy != "single" and request.gpus == 1):
            continue
        offload = request.offload and strategy not in ("single", "ddp")
        try:
            each = estimate(dataclasses.replace(request, strategy=strategy, offload=offload))
        except PolicyError:
            continue
        found[strategy] = [gpu for gpu in MEMORY_MIB if each.fits(gpu)]
    return found
