"""How fast FP8 and the opt-ins make an unmodified LlamaForCausalLM, against the same script with torch.compile alone.

    python benchmarks/fp8.py --output benchmarks/results/fp8.json                      # one Hopper GPU, 10 minutes
    python benchmarks/fp8.py --merge --output FILE --only "fp8, te" "auto"             # some rows, into what is there
    python benchmarks/fp8.py --gpus 2 --merge --output FILE                            # DDP, FSDP and ZeRO-2, two GPUs
    python benchmarks/fp8.py --gpus 4 --merge --output FILE                            # the same on four
    python benchmarks/fp8.py --quick                                                   # tries the program on a CPU

Each variant trains in a process of its own: FP32 weights from a config, BF16 autocast, fused AdamW, random tokens. The
`stock` process of a size stays alive, and each variant takes turns with it, so that a busy neighbour hits both; the
ratio is that of the medians of these rounds, `mean_ratio` that of their means, `fastest_ratio` that of their fastest
steps. `ms` is the time of a step with a synchronization after it, `flow` without one, `gpu` the kernels of one step by
kind. Up to four variants are built at the same time (half as many where the GPU has less than 100 GiB), so that
`first_step_s`, the time of the first step with compilation, is an upper bound. A row that fails is a row, with the
reason; with `--merge` it does not replace one that was measured.

`communication` on several GPUs includes the time for which one waits for the others; `communication alone` is the part
of it during which no other kernel runs, and `no kernel` the time during which none does.

All blocks of width 4096 are in FP8, because they stand for the many of a deep model: the recipe's first and last blocks
in BF16 are left out. `auto` is what it is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers import END, Times, Worker, device, device_name, serve, synchronize, timed_round, versions

LIBRARIES = ("torch", "transformers", "torchao", "transformer-engine", "deepspeed", "triton", "mpguard")

#: Name -> hidden size, FFN, heads, key and value heads, blocks, batch, tokens, vocabulary.
SIZES = {
    "4 x 8B, 2x4096": (4096, 14336, 32, 8, 4, 2, 4096, 32000),
    "8 x 2048, 1x2048": (2048, 8192, 32, 8, 8, 1, 2048, 32000),
    "12 x 768, 16x1024": (768, 3072, 12, 12, 12, 16, 1024, 32000),
    "12 x 768, 1x1024": (768, 3072, 12, 12, 12, 1, 1024, 32000),
    "8 x 2048, 2x4096": (2048, 8192, 32, 8, 8, 2, 4096, 32000),
    "6 x 3072, 2x4096": (3072, 8192, 24, 8, 6, 2, 4096, 32000),
    "4 x 8B, 1x1024": (4096, 14336, 32, 8, 4, 1, 1024, 32000),
    "4 x 8B, 4 of 2x4096": (4096, 14336, 32, 8, 4, 2, 4096, 32000),
    "6 x 8B, 2x4096, FSDP2": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "6 x 8B, 2x4096, ZeRO-2": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "6 x 8B, 2x4096, DDP": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "6 x 8B, 2x4096, FSDP1": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "6 x 8B, 2x4096, accelerate FSDP2": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "8 x 8B, 2x4096, FSDP2, 4 GPUs": (4096, 14336, 32, 8, 8, 2, 4096, 32000),
    "6 x 8B, 2x4096, DDP, 4 GPUs": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "6 x 8B, 2x4096, ZeRO-2, 4 GPUs": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "6 x 8B, 2x4096, FSDP1, 4 GPUs": (4096, 14336, 32, 8, 6, 2, 4096, 32000),
    "tiny": (64, 128, 4, 2, 2, 2, 32, 256),
    "tiny, DDP": (64, 128, 4, 2, 2, 2, 32, 256),
    "tiny, FSDP1": (64, 128, 4, 2, 2, 2, 32, 256),
    "tiny, FSDP2": (64, 128, 4, 2, 2, 2, 32, 256),
    "tiny, ZeRO-2": (64, 128, 4, 2, 2, 2, 32, 256),
    "tiny, accelerate FSDP2": (64, 128, 4, 2, 2, 2, 32, 256),
}

#: Forward and backward passes per step, of sizes that have several.
PASSES = {"4 x 8B, 4 of 2x4096": 4}

FP8 = "bf16_with_fp8_current_scaling_mixed"
TORCHAO = {"backend": "torchao"}
HEAD = {**TORCHAO, "fp8_head": True, "fp8_fast_accum": True}


@dataclasses.dataclass(frozen=True)
class Variant:
    """recipe: None without mpguard. changes: of its fields. compiled: the script compiles.

    by_hand: how the script converts to FP8 itself, a name in `CONVERSIONS`; empty if it does not.
    prepared: the backend of accelerate's `mixed_precision: fp8` ("ao" or "te") that prepares the model; empty: a loop
    without accelerate.
    """

    recipe: str | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiled: bool = True
    by_hand: str = ""
    prepared: str = ""


VARIANTS = {
    "stock": Variant(),
    "bf16": Variant("bf16_mixed"),
    "fp8": Variant(FP8),
    "fp8, te": Variant(FP8, {"backend": "te"}),
    "fp8, te, weight cache": Variant(FP8, {"backend": "te", "fp8_weight_cache": True}),
    "fp8, torchao by hand": Variant("bf16_mixed", by_hand="torchao"),
    "no mpguard: torchao by hand": Variant(by_hand="torchao"),
    "no mpguard: accelerate, torchao": Variant(prepared="ao"),
    "no mpguard: accelerate, te": Variant(prepared="te", compiled=False),
    "fp8, te fused by hand": Variant("bf16_mixed", by_hand="te, fused"),
    "fp8, torchao fused by hand": Variant("bf16_mixed", by_hand="torchao, fused"),
    "fp8, head, fast": Variant(FP8, HEAD),
    "fp8, head, fast, masters": Variant(FP8, {**HEAD, "master_weights": "optimizer"}),
    "bf16, masters": Variant("bf16_mixed", {"master_weights": "optimizer"}),
    "fp8, not compiled by the script": Variant(FP8, compiled=False),
    "bf16, graphs": Variant("bf16_mixed", {"compile_mode": "reduce-overhead"}),
    "fp8, graphs": Variant(FP8, {**TORCHAO, "compile_mode": "reduce-overhead"}),
    "auto": Variant("auto"),
    "fp8, reduced in bf16": Variant(FP8, {"grad_reduce_in_fp32": False}),
    "fp8, float8 all-gather": Variant(FP8, {**TORCHAO, "fp8_param": True}),
    "fp8, gathered in bf16": Variant(FP8, {**TORCHAO, "fp8_param": False}),
    "fp8, float8 all-gather, not compiled by the script": Variant(FP8, {**TORCHAO, "fp8_param": True}, compiled=False),
}

#: What is measured on one GPU, the most telling first.
PLAN = (
    ("4 x 8B, 2x4096", "bf16"),
    ("4 x 8B, 2x4096", "fp8"),
    ("4 x 8B, 2x4096", "fp8, head, fast"),
    ("4 x 8B, 2x4096", "fp8, head, fast, masters"),
    ("4 x 8B, 2x4096", "fp8, torchao by hand"),
    ("4 x 8B, 2x4096", "bf16, masters"),
    ("8 x 2048, 1x2048", "auto"),
    ("8 x 2048, 1x2048", "bf16"),
    ("12 x 768, 16x1024", "auto"),
    ("12 x 768, 16x1024", "bf16"),
    ("4 x 8B, 2x4096", "fp8, not compiled by the script"),
    ("4 x 8B, 2x4096", "fp8, te"),
    ("4 x 8B, 2x4096", "auto"),
    ("4 x 8B, 2x4096", "no mpguard: torchao by hand"),
    ("4 x 8B, 2x4096", "no mpguard: accelerate, torchao"),
    ("4 x 8B, 2x4096", "no mpguard: accelerate, te"),
    ("12 x 768, 1x1024", "auto"),
    ("8 x 2048, 2x4096", "auto"),
    ("6 x 3072, 2x4096", "auto"),
    ("4 x 8B, 1x1024", "auto"),
    ("4 x 8B, 2x4096", "fp8, te fused by hand"),
    ("4 x 8B, 2x4096", "fp8, torchao fused by hand"),
    ("8 x 2048, 2x4096", "fp8"),
    ("8 x 2048, 2x4096", "fp8, te fused by hand"),
    ("4 x 8B, 4 of 2x4096", "fp8"),
    ("4 x 8B, 4 of 2x4096", "fp8, te"),
    ("4 x 8B, 4 of 2x4096", "fp8, te, weight cache"),
    ("8 x 2048, 1x2048", "bf16, graphs"),
    ("8 x 2048, 1x2048", "fp8, graphs"),
    ("12 x 768, 16x1024", "bf16, graphs"),
    ("12 x 768, 1x1024", "bf16, graphs"),
    ("12 x 768, 1x1024", "bf16"),
)
#: What is measured on two.
TWO_GPUS = (
    ("6 x 8B, 2x4096, FSDP2", "fp8"),
    ("6 x 8B, 2x4096, FSDP2", "bf16"),
    ("6 x 8B, 2x4096, ZeRO-2", "fp8"),
    ("6 x 8B, 2x4096, ZeRO-2", "fp8, not compiled by the script"),
    ("6 x 8B, 2x4096, ZeRO-2", "bf16"),
    ("6 x 8B, 2x4096, ZeRO-2", "fp8, reduced in bf16"),
    ("6 x 8B, 2x4096, DDP", "fp8"),
    ("6 x 8B, 2x4096, DDP", "bf16"),
    ("6 x 8B, 2x4096, FSDP1", "fp8"),
    ("6 x 8B, 2x4096, FSDP1", "bf16"),
    ("6 x 8B, 2x4096, accelerate FSDP2", "fp8"),
    ("6 x 8B, 2x4096, accelerate FSDP2", "fp8, float8 all-gather"),
    ("6 x 8B, 2x4096, accelerate FSDP2", "fp8, float8 all-gather, not compiled by the script"),
    ("6 x 8B, 2x4096, accelerate FSDP2", "fp8, gathered in bf16"),
    ("6 x 8B, 2x4096, accelerate FSDP2", "bf16"),
)
#: What is measured on four.
FOUR_GPUS = (
    ("8 x 8B, 2x4096, FSDP2, 4 GPUs", "fp8"),
    ("8 x 8B, 2x4096, FSDP2, 4 GPUs", "bf16"),
    ("6 x 8B, 2x4096, DDP, 4 GPUs", "fp8"),
    ("6 x 8B, 2x4096, ZeRO-2, 4 GPUs", "fp8"),
    ("6 x 8B, 2x4096, FSDP1, 4 GPUs", "fp8"),
)
QUICK = (
    ("tiny", "bf16"),
    ("tiny", "fp8, torchao by hand"),
    ("tiny", "fp8, head, fast, masters"),
    ("tiny", "auto"),
    ("tiny", "fp8, torchao fused by hand"),
    ("tiny", "no mpguard: torchao by hand"),
    ("tiny", "no mpguard: accelerate, torchao"),
    ("tiny, DDP", "fp8"),
    ("tiny, FSDP1", "fp8"),
    ("tiny, FSDP2", "fp8"),
    ("tiny, ZeRO-2", "fp8"),
    ("tiny, accelerate FSDP2", "fp8, float8 all-gather"),
)

#: The bounds that this table has to meet: (size, variant) -> ratio to stock.
BOUNDS = {
    ("4 x 8B, 2x4096", "bf16"): 1.15,
    ("4 x 8B, 2x4096", "fp8"): 1.50,
    ("4 x 8B, 2x4096", "fp8, not compiled by the script"): 1.50,
    ("4 x 8B, 2x4096", "fp8, head, fast"): 1.57,
    ("4 x 8B, 2x4096", "fp8, head, fast, masters"): 1.63,
    ("8 x 2048, 1x2048", "auto"): 1.10,
    ("12 x 768, 16x1024", "auto"): 1.10,
    ("4 x 8B, 2x4096", "auto"): 0.99,
    ("12 x 768, 1x1024", "auto"): 0.99,
    ("8 x 2048, 2x4096", "auto"): 0.99,
    ("6 x 3072, 2x4096", "auto"): 0.99,
    ("4 x 8B, 1x1024", "auto"): 0.99,
    ("6 x 8B, 2x4096, FSDP2", "fp8"): 1.40,
    ("8 x 8B, 2x4096, FSDP2, 4 GPUs", "fp8"): 1.50,
    ("6 x 8B, 2x4096, ZeRO-2", "fp8"): 1.30,
    ("6 x 8B, 2x4096, ZeRO-2", "fp8, reduced in bf16"): 1.40,
}

#: Steps before the first round, and rounds and steps in each, once with and once without waiting: after the look of the
#: proof at step 64, and before the next one at step 128.
WARM_UP, ROUNDS, STEPS = 65, 3, 10

#: The same for sizes whose GPU waits for Python most of the time: their steps vary by a factor, so that more of them
#: are timed, between the looks at steps 256 and 512.
HOST_BOUND = {"12 x 768, 1x1024": (257, 12)}

#: Variants that are built at the same time (half as many under DDP, whose ranks hold all weights), and the most seconds
#: for that.
AT_ONCE, BUILT = 4, 260.0

#: Rows of the proof that are part of the result.
ROWS = (
    "fp8",
    "fp8 products",
    "fp8 head",
    "fp8 weight cache",
    "parameters",
    "compile",
    "compile mode",
    "attention mask",
)

#: Kernels by kind; cuBLAS's names have q for E4M3 and r for E5M2.
FP8_KERNELS = r"e4m3|e5m2|nvjet_(sm90_)?[qr]{2}|fp8|float8|f8|scaled_mm"
KINDS = (
    ("communication", r"nccl"),
    ("optimizer", r"multi_tensor|adam"),
    ("rest", r"^triton_(?!tem)"),
    ("attention", r"flash|fmha|sdpa|attention|cudnn_generated"),
    ("products", r"gemm|nvjet|cutlass|triton_tem"),
    ("copy", r"^Mem(cpy|set)"),
)
#: How the names of events on the GPU begin that are no kernels: ranges around them.
NO_KERNELS = ("Lazy", "Activity", "nccl:", "FSDP::", "##", "Optimizer.")


# -- a worker: one variant of one size ---------------------------------------------------------------------------------


def strategy_of(size: str) -> str | None:
    """Return what divides the model or its batches among several processes; None for one process."""
    parts = size.split(", ")
    return next((each for each in ("accelerate FSDP2", "FSDP2", "FSDP1", "ZeRO-2", "DDP") if each in parts), None)


def processes_of(size: str) -> int:
    """Return the number of processes, each with a GPU."""
    return 4 if size.endswith(", 4 GPUs") else 1 if strategy_of(size) is None else 2


def policy_of(variant: Variant) -> Any:
    import mpguard

    assert variant.recipe is not None
    policy = mpguard.recipe(variant.recipe)
    changes = dict(variant.changes)
    if variant.recipe == FP8:
        changes["first_last_layers_bf16"] = False
    if policy.fp8 and device() == "cpu":
        changes |= {"fp8_emulate": True, **TORCHAO}
    return policy.replace(**changes)


def convert_to_torchao(model: Any) -> None:
    """Convert as torchao's documentation does: every Linear but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device() == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


def fuse_for_torchao(model: Any) -> None:
    """One Linear for queries, keys and values, and one for gate and up; all of them converted to torchao's layers."""
    import torch
    from torch import nn

    for block in model.model.layers:
        for parent, names in ((block.self_attn, ("q_proj", "k_proj", "v_proj")), (block.mlp, ("gate_proj", "up_proj"))):
            parts = [getattr(parent, name) for name in names]
            weight = torch.cat([part.weight.detach() for part in parts])
            fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            fused.weight = nn.Parameter(weight)
            share(parent, names, fused)
    convert_to_torchao(model)


def fuse_for_te(model: Any) -> None:
    """Norm, queries, keys and values as one module of Transformer Engine, and norm and MLP as another one."""
    import torch
    import transformer_engine.pytorch as te
    from torch import nn

    def fill(target: Any, *values: Any) -> None:
        with torch.no_grad():
            target.copy_(torch.cat(values))

    names = ("q_proj", "k_proj", "v_proj")
    for block in model.model.layers:
        attention, mlp, norm = block.self_attn, block.mlp, block.input_layernorm
        options = {"bias": False, "params_dtype": norm.weight.dtype, "device": norm.weight.device}
        normed = {**options, "eps": norm.variance_epsilon, "normalization": "RMSNorm"}
        parts = {name: getattr(attention, name).weight for name in names}
        width, inner = mlp.up_proj.in_features, mlp.up_proj.out_features
        split = {name: len(weight) for name, weight in parts.items()}
        fused = te.LayerNormLinear(width, sum(split.values()), parameters_split=split, **normed)
        fill(fused.layer_norm_weight, norm.weight)
        for name, weight in parts.items():
            fill(getattr(fused, f"{name}_weight"), weight)
        share(attention, names, fused)
        out = te.Linear(attention.o_proj.in_features, attention.o_proj.out_features, **options)
        fill(out.weight, attention.o_proj.weight)
        both = te.LayerNormMLP(width, inner, activation="swiglu", **normed)
        fill(both.layer_norm_weight, block.post_attention_layernorm.weight)
        fill(both.fc1_weight, mlp.gate_proj.weight, mlp.up_proj.weight)
        fill(both.fc2_weight, mlp.down_proj.weight)
        attention.o_proj, block.mlp = out, both
        block.input_layernorm, block.post_attention_layernorm = nn.Identity(), nn.Identity()


def share(parent: Any, names: Sequence[str], fused: Any) -> None:
    """Put one layer in the place of several with the same input: the first computes all, the others return their part.

    That is what can be done to a model whose forward is not changed.
    """
    import torch
    from torch import nn

    sizes = [getattr(parent, name).weight.shape[0] for name in names]

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.parts = fused, ()

        def forward(self, x: Any) -> Any:
            first, *self.parts = torch.split(self.fused(x), sizes, dim=-1)
            return first

    class Other(nn.Module):
        def __init__(self, first: Any, number: int) -> None:
            super().__init__()
            self.first, self.number = [first], number

        def forward(self, _x: Any) -> Any:
            return self.first[0].parts[self.number]

    first = First()
    for number, name in enumerate(names):
        setattr(parent, name, Other(first, number - 1) if number else first)


CONVERSIONS: Mapping[str, Callable[[Any], None]] = {
    "torchao": convert_to_torchao,
    "torchao, fused": fuse_for_torchao,
    "te, fused": fuse_for_te,
}


def trainer(size: str, variant: Variant) -> Callable[[], Any]:
    """Return a function that trains one step and returns the loss, not read yet."""
    if variant.recipe is not None:
        import mpguard

        # By hand, mpguard only keeps `is_causal`: the two variants differ in who converts.
        mpguard.activate(policy_of(variant), enforce="off" if variant.by_hand else "warn")
    import torch

    strategy = strategy_of(size)
    model, batches = llama(SIZES[size])
    where = batches[0].device
    if variant.by_hand:
        CONVERSIONS[variant.by_hand](model)
    if strategy == "ZeRO-2":
        return zero2(model, batches, variant)
    if strategy == "accelerate FSDP2" or variant.prepared:
        return accelerated(model, batches, variant)
    if strategy == "FSDP2":
        shard(model)
    model = fsdp1(model) if strategy == "FSDP1" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    net = compiled(ddp(model) if strategy == "DDP" else model, variant)
    by_hand_on_cpu = bool(variant.by_hand) and where.type == "cpu"  # torchao reads only the state of CUDA's autocast
    autocast = strategy in (None, "DDP") and not by_hand_on_cpu  # FSDP casts itself
    regions = fp8_regions() if variant.by_hand.startswith("te") else contextlib.nullcontext
    return training_step(net, optimizer, batches, autocast, passes=PASSES.get(size, 1), region=regions)


def fp8_regions() -> Callable[[], Any]:
    """Return a function that returns Transformer Engine's context manager for current scaling."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    return functools.partial(te.autocast, recipe=Float8CurrentScaling())


def llama(size: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """Return a LlamaForCausalLM of a size (as in `SIZES`) on this process's device, and four batches of tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, heads, groups, blocks, batch, tokens, vocabulary = size
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=groups,
        num_hidden_layers=blocks, vocab_size=vocabulary, max_position_embeddings=tokens, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    where = torch.device(device(), rank) if device() == "cuda" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    with where:
        model = LlamaForCausalLM(config).train()
    generator = torch.Generator().manual_seed(1 + rank)
    return model, [torch.randint(0, vocabulary, (batch, tokens), generator=generator).to(where) for _ in range(4)]


def training_step(
    net: Any,
    optimizer: Any,
    batches: list[Any],
    autocast: bool = True,
    *,
    passes: int = 1,
    region: Callable[[], Any] = contextlib.nullcontext,
) -> Callable[[], Any]:
    """Return a step of a plain loop over some batches. autocast: False for engines that cast themselves."""
    import torch

    number = 0

    def step() -> Any:
        nonlocal number
        for _ in range(passes):
            ids, number = batches[number % 4], number + 1
            with torch.autocast(device(), dtype=torch.bfloat16, enabled=autocast), region():
                loss = net(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def compiled(model: Any, variant: Variant) -> Any:
    """Return the model as the script calls it."""
    import torch

    return torch.compile(model, backend=_backend()) if variant.compiled else model


def _backend() -> str:
    return "inductor" if device() == "cuda" else "aot_eager"


def shard(model: Any) -> None:
    """Shard the blocks and the model with FSDP2: FP32 shards, products and gathers in BF16, reduction in FP32."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl" if device() == "cuda" else "gloo")
    mesh = dist.device_mesh.init_device_mesh(device(), (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)


def fsdp1(model: Any) -> Any:
    """Return the model in FSDP1, block by block: FP32 shards, matmuls and gathers in BF16, reduction in FP32."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("nccl" if device() == "cuda" else "gloo")
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=next(model.parameters()).device,
        use_orig_params=True,
    )


def ddp(model: Any) -> Any:
    """Return the model in DDP: FP32 parameters and reduction."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl" if device() == "cuda" else "gloo")
    return DistributedDataParallel(model)


def accelerated(model: Any, batches: list[Any], variant: Variant) -> Callable[[], Any]:
    """Return a step of accelerate: `mixed_precision: fp8` in one process, else FSDP2 in BF16.

    FSDP2 has FP32 shards, matmuls and gathers in BF16, and reduces as accelerate has it. FP8 is accelerate's own, with
    the output head left out, and with torchao without the all-gather that needs FSDP2 (its weights would not train).
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, TERecipeKwargs

    if variant.prepared == "ao":
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=False, emulate=device() == "cpu")
        handlers = [AORecipeKwargs(config=config)]
    else:
        handlers = [TERecipeKwargs()] if variant.prepared == "te" else []
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(
        mixed_precision="fp8" if variant.prepared else "bf16",
        cpu=device() == "cpu",
        dynamo_backend=_backend() if variant.compiled else "no",
        fsdp_plugin=None if variant.prepared else plugin,
        kwargs_handlers=handlers,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    net, optimizer = accelerator.prepare(model, optimizer)
    number = 0

    def step() -> Any:
        nonlocal number
        ids, number = batches[number % 4], number + 1
        loss = net(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def zero2(model: Any, batches: list[Any], variant: Variant) -> Callable[[], Any]:
    """Return a step of a DeepSpeed engine: ZeRO-2 in BF16, with torch's AdamW over FP32 masters."""
    import deepspeed
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device() == "cuda")
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0]),
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    deepspeed.init_distributed("nccl" if device() == "cuda" else "gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if variant.compiled:
        engine.compile(backend=_backend())
    number = 0

    def step() -> Any:
        nonlocal number
        ids, number = batches[number % 4], number + 1
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def work(size: str, name: str) -> None:
    """Train in this process: a round for each line on stdin, and kernels and proof at the end. The first builds it."""
    import torch
    import transformers  # noqa: F401  while another variant is measured

    variant = VARIANTS[name]
    own: list[Callable[[], Any]] = []

    def prepare() -> tuple[dict[str, Any], Callable[[], Any]]:
        began = time.perf_counter()
        own.append(step := trainer(size, variant))
        first = float(step())
        took = time.perf_counter() - began
        loss = [float(step()) for _ in range(timing(size)[0])][-1]
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return {"loss": [first, loss], "first_step_s": took, "device": device_name()}, lambda: timed_round(step, STEPS)

    serve(prepare, lambda: {**memory(), **kernels(own[0]), **proven(variant)})


def memory() -> dict[str, Any]:
    import torch

    return {"gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if device() == "cuda" else {}


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """Return the milliseconds of one step's kernels by kind."""
    if device() != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    kinds: dict[str, float] = {}
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # of communication, and of other kernels
    with contextlib.suppress(Exception):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            synchronize()
        for event in trace.events():
            if "CUDA" not in str(event.device_type) or event.is_user_annotation or event.name.startswith(NO_KERNELS):
                continue
            kind = next((name for name, pattern in KINDS if re.search(pattern, event.name, re.IGNORECASE)), "rest")
            if kind == "products" and re.search(FP8_KERNELS, event.name, re.IGNORECASE):
                kind = "products in fp8"
            kinds[kind] = kinds.get(kind, 0.0) + event.time_range.elapsed_us() / 1e3
            spans[kind == "communication"].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
        every = sorted(spans[True] + spans[False])
        busy = covered(every)
        if spans[True]:
            kinds["communication alone"] = busy - covered(spans[False])
        kinds["no kernel"] = max(end for _, end in every) - every[0][0] - busy
    return {"gpu": {kind: round(ms, 2) for kind, ms in kinds.items()}}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the time during which at least one of some spans runs."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def proven(variant: Variant) -> dict[str, Any]:
    """Return the verdict of mpguard's proof, and the rows about FP8."""
    if variant.recipe is None or variant.by_hand:
        return {}
    from mpguard.runtime.guard import current

    guard = current()
    proof = guard.proof if guard is not None else None
    if guard is None or proof is None:
        return {"proof": "none"}
    rows = {row.name: row.found for row in proof.rows if row.name in ROWS}
    return {"proof": proof.verdict, "failures": list(proof.failures), "rows": rows, "recipe": guard.plan.policy.name}


# -- the parent --------------------------------------------------------------------------------------------------------


def worker_of(size: str, variant: str) -> Worker:
    return Worker(f"{size}, {variant}", [__file__, "--work", variant, "--size", size], processes_of(size))


def timing(size: str) -> tuple[int, int]:
    """Return the number of steps before the first round, and of rounds."""
    return HOST_BOUND.get(size, (WARM_UP, ROUNDS))


def pair(stock: Worker, worker: Worker, rounds: int) -> dict[str, Any]:
    """Return what rounds in turn with those of `stock` give, and what the worker says at its end."""
    own, base = Times(), Times()
    for _ in range(rounds):
        base.add(stock.ask())
        own.add(worker.ask())
    row = {**own.row(), "stock_ms": statistics.median(base.ms), "stock_flow": statistics.median(base.flow)}
    row["ratio"] = round(row["stock_ms"] / row["ms"], 3)
    row["mean"], row["stock_mean"] = statistics.mean(own.ms), statistics.mean(base.ms)
    row["mean_ratio"] = round(row["stock_mean"] / row["mean"], 3)
    row["fastest_ratio"] = round(min(base.ms) / row["lo"], 3)
    row["flow_ratio"] = round(row["stock_flow"] / row["flow"], 3)
    return {**row, **worker.ask(END, 60.0)}


def measure(plan: tuple[tuple[str, str], ...], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield a row per variant. Nothing is begun after the deadline, in seconds."""
    began = time.monotonic()
    for size in dict.fromkeys(size for size, _ in plan):
        variants = [variant for each, variant in plan if each == size]
        at_once = AT_ONCE // (2 if strategy_of(size) == "DDP" else 1) // (1 if roomy() else 2)
        stock: Worker | None = None
        try:
            for first in range(0, len(variants), at_once):
                some = variants[first : first + at_once]
                if time.monotonic() - began > deadline:
                    yield from ({"size": size, "variant": each, "state": "no time"} for each in some)
                    continue
                if stock is None or stock.ended:
                    stock = worker_of(size, "stock")
                    stock.tell()
                    yield from together(size, stock, some, fresh=True)
                else:
                    yield from together(size, stock, some, fresh=False)
        finally:
            if stock is not None:
                stock.end()


def roomy() -> bool:
    """Return True if the GPU has room for five copies of a model of four 8B blocks."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory > 100 * 2**30


def together(size: str, stock: Worker, variants: list[str], *, fresh: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per variant: all are built at the same time, and then each takes turns with `stock`."""
    workers = {variant: worker_of(size, variant) for variant in variants}
    for worker in workers.values():
        worker.tell()
    try:
        built = {variant: answer(worker) for variant, worker in workers.items()}
        base = answer(stock) if fresh else {}
        if fresh:
            yield {"size": size, "variant": "stock", **base}
        for variant, worker in workers.items():
            row = {"size": size, "variant": variant, **built[variant]}
            if "state" in base:
                row["state"] = "failed: no stock to compare with"
            if "state" not in row:
                try:
                    row |= pair(stock, worker, timing(size)[1])
                except RuntimeError as error:
                    row["state"] = f"failed: {error}"
            worker.end()
            print(text_of(row), flush=True)
            yield row
    finally:
        for worker in workers.values():
            worker.end()


def answer(worker: Worker) -> dict[str, Any]:
    """Return the first answer of a worker, or why there is none."""
    try:
        return worker.answer(BUILT)
    except RuntimeError as error:
        return {"state": f"failed: {error}"}


def text_of(row: Mapping[str, Any]) -> str:
    name = f"{row['size']:18} {row['variant']:32}"
    if "ratio" not in row:
        return f"{name} {row['state']}"
    bound = BOUNDS.get((row["size"], row["variant"]))
    verdict = "" if bound is None else f" (bound {bound}: {'met' if row['ratio'] >= bound else 'MISSED'})"
    gpu = " ".join(f"{kind} {ms}" for kind, ms in row.get("gpu", {}).items())
    times = f"{row['ms']:7.1f} ms ({row['lo']:.1f} to {row['hi']:.1f}), stock {row['stock_ms']:.1f}"
    ratios = f"mean x{row['mean_ratio']:.3f}, fastest x{row['fastest_ratio']:.3f}, flow x{row['flow_ratio']:.3f}"
    more = f"{ratios}, host {row['host']:.1f} ms, {row.get('gib', 0)} GiB"
    ran = f"loss {row['loss'][1]:.4f}, first step {row['first_step_s']:.0f} s, {row.get('proof', 'no proof')}"
    facts = "; ".join([gpu, *(f"{key}: {found}" for key, found in row.get("rows", {}).items())])
    failures = "".join(f"\n    {each}" for each in row.get("failures", ()))
    return f"{name} {times}: x{row['ratio']:.3f}{verdict}, {more}, {ran}\n    {facts}{failures}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the file that are not measured again")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the program, measures nothing")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), default=1, help="the plan for so many GPUs")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="ROW", help="these rows (`SIZE, VARIANT`), or all with such a part"
    )
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no variant is begun")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.size, options.work)
        return 0
    began = time.monotonic()
    whole = QUICK if options.quick else {1: PLAN, 2: TWO_GPUS, 4: FOUR_GPUS}[options.gpus]
    exact = {", ".join(each) for each in whole}.intersection(options.only)
    parts = [word for word in options.only if word not in exact]
    plan = tuple(each for each in whole if (name := ", ".join(each)) in exact or any(part in name for part in parts))
    if not plan:
        parser.error(f"no row has {' or '.join(options.only)} in its name: {'; '.join(map(', '.join, whole))}")
    rows: list[dict[str, Any]] = []
    for row in measure(plan, options.deadline):
        rows.append(row)
        if options.output:
            write(options.output, rows, time.monotonic() - began, merge=options.merge)
    return 1 if any("state" in row for row in rows) else 0


def write(path: Path, rows: list[dict[str, Any]], seconds: float, *, merge: bool) -> None:
    """Write the result; with `merge` rows of the file stay that are not among the new ones, or only failed there."""
    old = json.loads(path.read_text(encoding="utf-8")) if merge and path.exists() else {"rows": []}
    stamp = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "versions": versions(LIBRARIES)}
    own = {(row["size"], row["variant"]): {**row, **stamp, "warm_up": timing(row["size"])[0]} for row in rows}
    kept = {(row["size"], row["variant"]): row for row in old["rows"]}
    for row in kept.values():
        for key in (*stamp, "device"):
            row.setdefault(key, old[key])
    merged = kept | {
        key: row for key, row in own.items() if "state" not in row or "state" in kept.get(key, {"state": 1})
    }
    order = {key: place for place, key in enumerate((*PLAN, *TWO_GPUS, *FOUR_GPUS))}
    found = sorted(merged.values(), key=lambda row: order.get((row["size"], row["variant"]), -1))
    result = {
        **stamp,
        "device": next((row["device"] for row in rows if "device" in row), old.get("device")),
        "sizes": {name: SIZES[name] for name in dict.fromkeys(row["size"] for row in found)},
        "bounds": {", ".join(key): bound for key, bound in BOUNDS.items()},
        "steps": {"warm_up": WARM_UP, "rounds": ROUNDS, "in_each": STEPS},
        "seconds": round(seconds) + old.get("seconds", 0),
        "rows": found,
    }
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
