"""Programs of each kind of parallelism on several GPUs, written as public code writes them; parallel.py starts them.

    torchrun --nproc_per_node 4 benchmarks/gpu_programs/parallel.py ddp                                  # stock
    torchrun --nproc_per_node 4 -m mpguard.run --config mp.yaml benchmarks/gpu_programs/parallel.py ddp  # with mpguard
    torchrun --nproc_per_node 4 benchmarks/gpu_programs/parallel.py tp --recipe bf16_mixed  # tp, pp: no strategy

A Llama-like model of 120 million parameters trains 40 steps on a Markov chain. Rank 0 (the last one of a pipeline)
prints RESULT: losses, the seconds of the first step and the milliseconds of the others. A step that takes longer than
HANG seconds (environment, 110) ends with the stacks of all threads. Without a GPU: the same with gloo and tiny sizes,
but for `cp`, whose attention torch has for GPUs only.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANK, LOCAL, WORLD = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
GPU = torch.cuda.is_available()
DEV = "cuda" if GPU else "cpu"
WIDTH, INNER, HEADS, LAYERS = (1024, 2816, 16, 8) if GPU else (64, 128, 4, 4)
VOCAB, TOKENS, ROWS, STEPS = (8192, 1024, 4, 40) if GPU else (256, 32, 2, 5)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))

        def rotate(z: Any) -> Any:
            a, b = z.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(v)

        h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.wo(h.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """A gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """One expert per rank, top 1, tokens sent and fetched by all_to_all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WORLD, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        import torch.distributed.nn.functional as dfn

        h = x.flatten(0, 1)
        p, e = self.router(h).float().softmax(-1).max(-1)
        order, sent = e.argsort(), torch.bincount(e, minlength=WORLD)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        mine = h[order]
        got = dfn.all_to_all_single(mine.new_empty(sum(received), WIDTH), mine, received, sent)
        y = self.w2(F.silu(self.w1(got))).type_as(mine)
        back = dfn.all_to_all_single(y.new_empty(sum(sent), WIDTH), y.contiguous(), sent, received)
        out = torch.zeros_like(h).index_copy(0, order, back.type_as(h))
        return (out * p[:, None].type_as(out)).view_as(x)


class Block(nn.Module):
    """A block of the transformer."""

    def __init__(self, mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH), mlp()

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        x = x + self.attn(self.n1(x), cos, sin)
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    """The model, or the part of it that a stage of a pipeline keeps."""

    def __init__(self, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.tok, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block(mlp) for _ in range(LAYERS))
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        rates = 1e4 ** (-torch.arange(0, WIDTH // HEADS, 2).float() / (WIDTH // HEADS))
        angles = torch.outer(torch.arange(TOKENS).float(), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for p in self.parameters():
            nn.init.ones_(p) if p.dim() == 1 else nn.init.normal_(p, std=0.02)

    def forward(self, ids: Any) -> Any:
        h = self.tok(ids) if self.tok is not None else ids
        for layer in self.layers:
            h = layer(h, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return self.out(self.norm(h)) if self.out is not None else h


def data(seed: int) -> Any:
    """Return the rows of all steps, of a Markov chain whose next token is known 9 times in 10."""
    follow = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7)).to(DEV)
    g = torch.Generator().manual_seed(100 + seed)
    x = torch.randint(0, VOCAB, (STEPS * ROWS, TOKENS + 1), generator=g).to(DEV)
    keep = (torch.rand(STEPS * ROWS, TOKENS + 1, generator=g) < 0.9).to(DEV)
    for i in range(1, TOKENS + 1):
        x[:, i] = torch.where(keep[:, i], follow[x[:, i - 1]], x[:, i])
    return x


def loss_of(logits: Any, ids: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def shard(model: Any, mesh: Any) -> Any:
    """Shard the blocks and the model with FSDP2."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    return fully_shard(model, mesh=mesh, mp_policy=BF16)


def tensor_parallel(model: Any, mesh: Any) -> Any:
    """Divide the layers among ranks, as torch's tutorial does, with sequence parallelism."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    outside = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outside)
    for layer in model.layers:
        inside = {
            "n1": SequenceParallel(),
            "n2": SequenceParallel(),
            "attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attn.wq": ColwiseParallel(),
            "attn.wk": ColwiseParallel(),
            "attn.wv": ColwiseParallel(),
            "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.w1": ColwiseParallel(),
            "mlp.w3": ColwiseParallel(),
            "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, inside)
    return model


def step_of(model: Any, opt: Any, autocast: bool = False, clip: bool = True) -> Callable[[Any], Any]:
    """Return a function that trains on some rows and returns the loss."""

    def step(x: Any) -> Any:
        with torch.autocast(DEV, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(model(x[:, :-1]), x[:, 1:])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def fit(step: Callable[[Any], Any], seed: int, reports: bool = RANK == 0) -> None:
    """Train, and print the result on one rank."""
    x, ms, losses = data(seed), list[float](), list[float]()
    for i in range(STEPS):
        faulthandler.dump_traceback_later(int(os.environ.get("HANG") or 110), exit=True)
        if GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(x[i * ROWS : (i + 1) * ROWS])
        if GPU:
            torch.cuda.synchronize()
        ms.append((time.perf_counter() - start) * 1e3)
        losses.append(0.0 if loss is None else float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    faulthandler.cancel_dump_traceback_later()
    if reports:
        found = {
            "first": losses[0],
            "last": losses[-1],
            "first_step_s": ms[0] / 1e3,
            "step_ms": statistics.median(ms[1:]),
        }
        print("RESULT", json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)


def new() -> Any:
    return Net().to(DEV)


def mesh(*sizes: int, names: tuple[str, ...]) -> Any:
    return init_device_mesh(DEV, sizes, mesh_dim_names=names)


def ddp() -> None:
    model = nn.parallel.DistributedDataParallel(new(), device_ids=[LOCAL] if GPU else None)
    fit(step_of(model, adam(model), autocast=True), RANK)


def fsdp2() -> None:
    model = shard(new(), mesh(WORLD, names=("dp",)))
    fit(step_of(model, adam(model)), RANK)


def hsdp() -> None:
    model = shard(new(), mesh(2, WORLD // 2, names=("replicate", "shard")))
    fit(step_of(model, adam(model)), RANK)


def tp() -> None:
    model = tensor_parallel(new(), mesh(WORLD, names=("tp",)))
    fit(step_of(model, adam(model), autocast=True), 0)


def fsdp_tp() -> None:
    m = mesh(WORLD // 2, 2, names=("dp", "tp"))
    model = shard(tensor_parallel(new(), m["tp"]), m["dp"])
    fit(step_of(model, adam(model)), m["dp"].get_local_rank())


def cp() -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    m = mesh(WORLD // 2, 2, names=("dp", "cp"))
    model = shard(new(), m._flatten("dp_cp"))
    opt = adam(model)

    def step(x: Any) -> Any:
        ids, labels = x[:, :-1].contiguous(), x[:, 1:].contiguous()
        buffers = [ids, labels, model.cos, model.sin]
        parts = context_parallel(
            m["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers={ids, labels}
        )
        with parts, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            loss = loss_of(model(ids), labels)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    fit(step, m["dp"].get_local_rank())


def pipeline(
    model: Any, stage: int, stages: int, group: Any, *, schedule: str, microbatches: int, whole: bool, seed: int
) -> Iterator[Any]:
    """Train as a stage of a pipeline. Yields this stage's part of the model, which the caller may shard.

    whole: not sharded, so that autocast casts, and gradients of a part are not clipped.
    """
    from torch.distributed import pipelining

    n = LAYERS // stages
    model.layers = model.layers[stage * n : (stage + 1) * n]
    if stage:
        model.tok = None
    if stage < stages - 1:
        model.norm = model.out = None
    yield model
    opt = adam(model)
    where = torch.device(DEV, LOCAL) if GPU else torch.device("cpu")
    part = pipelining.PipelineStage(model, stage, stages, where, group=group)
    run = getattr(pipelining, schedule)(part, n_microbatches=microbatches, loss_fn=loss_of)

    def step(x: Any) -> Any:
        losses: list[Any] = []
        with torch.autocast(DEV, dtype=torch.bfloat16, enabled=whole):
            if stage == 0:
                run.step(x[:, :-1].contiguous())
            elif stage == stages - 1:
                run.step(target=x[:, 1:].contiguous(), losses=losses)
            else:
                run.step()
        if not whole:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    fit(step, seed, reports=RANK == WORLD - 1)


def pp() -> None:
    micro = 4 if GPU else 2
    for _ in pipeline(new(), RANK, WORLD, None, schedule="ScheduleGPipe", microbatches=micro, whole=True, seed=0):
        pass


def pp_fsdp() -> None:
    m = mesh(2, WORLD // 2, names=("pp", "dp"))
    options = {"schedule": "Schedule1F1B", "microbatches": 2, "whole": False, "seed": m["dp"].get_local_rank()}
    for model in pipeline(new(), m["pp"].get_local_rank(), 2, m["pp"].get_group(), **options):
        shard(model, m["dp"])


def ep() -> None:
    model = Net(Experts).to(DEV)
    own = [n for n, _ in model.named_parameters() if ".mlp.w" in n]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    torch.manual_seed(RANK)
    for n, p in model.named_parameters():
        if n in own:
            nn.init.normal_(p, std=0.02)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[LOCAL] if GPU else None)
    fit(step_of(wrapped, adam(model), autocast=True, clip=False), RANK)


PROGRAMS = {f.__name__: f for f in (ddp, fsdp2, hsdp, tp, fsdp_tp, cp, pp, pp_fsdp, ep)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--recipe", help="activate it here, for programs without a strategy")
    args = parser.parse_args()
    if args.recipe:
        import mpguard

        policy = mpguard.recipe(args.recipe)
        if "fp8" in args.recipe and not GPU:
            policy = policy.replace(fp8_emulate=True, backend="torchao", compile=False)
        mpguard.activate(policy)
    if GPU:
        torch.cuda.set_device(LOCAL)
    torch.manual_seed(0)
    dist.init_process_group("nccl" if GPU else "gloo")
    PROGRAMS[args.program]()
    dist.barrier()
    dist.destroy_process_group()
