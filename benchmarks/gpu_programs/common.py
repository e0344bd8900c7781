"""Shared by the three training programs of the GPU matrix: model, data, and the probe that observes the training.

The data is a Markov chain, so the loss falls within 100 steps to a floor well above zero, where two
runs can be compared by their relative difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, ROWS, BLOCKS, RATE = 256, 128, 8, 4, 5e-4

#: Steps that are compared, and those after them that are profiled.
STEPS, PROFILED = 100, 3

#: cuBLAS writes the operands' types as letters: q is E4M3, r is E5M2, t is bf16.
PRODUCT, NONE = re.compile(r"gemm|nvjet|cutlass"), re.compile(r"transformer_engine|nccl", re.I)
FP8 = re.compile(r"e4m3|e5m2|nvjet_(sm90_)?[qr]{2}|fp8|float8|f8", re.I)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--steps", type=int, default=STEPS + PROFILED)
    parser.add_argument("--masters", action="store_true", help="an optimizer that holds FP32 masters of FP8 parameters")
    parser.add_argument("--checkpointing", choices=("plain", "reentrant"), help="activation checkpointing")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters of a frozen model")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--local_rank", type=int, default=0, help="the deepspeed launcher gives it")
    return parser.parse_args()


def model(parsed: argparse.Namespace) -> Any:
    """Return a Llama of four blocks in FP32, the same for each seed, as the options want it."""
    net: Any = _llama()
    if parsed.checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": parsed.checkpointing == "reentrant"})
        if parsed.checkpointing == "reentrant":
            net.enable_input_require_grads()
    if parsed.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        net = get_peft_model(net, LoraConfig(r=16, lora_alpha=32, target_modules=names, modules_to_save=["lm_head"]))
    return net


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=BLOCKS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
        attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adam(parameters: Iterable[nn.Parameter], masters: bool) -> torch.optim.Optimizer:
    if not masters:
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    from transformer_engine.pytorch.optimizers import FusedAdam

    made: torch.optim.Optimizer = FusedAdam(parameters, lr=RATE, weight_decay=0.0, master_weights=True)
    return made


class Chain(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Yield sequences of a Markov chain: 9 of 10 tokens follow from the previous one."""

    def __init__(self, steps: int, ranks: int = 1) -> None:
        random = torch.Generator().manual_seed(1)
        count = steps * ROWS * ranks
        follows = torch.randperm(VOCABULARY, generator=random)
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=random)
        keep = torch.rand(count, LENGTH, generator=random) < 0.9
        for place in range(1, LENGTH):
            next_ = follows[self.tokens[:, place - 1]]
            self.tokens[:, place] = torch.where(keep[:, place], next_, self.tokens[:, place])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def world() -> tuple[int, int]:
    """Return the rank and the number of processes, as the launcher set them."""
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


class Probe:
    """Losses, which parameters have changed, and the kernels of a few steps; written to a file at the end."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.losses: list[Any] = []
        self.profiler: Any = None
        self.products: dict[str, list[float]] = {}

    def begin(self, trained: nn.Module, engine: Any = None) -> None:
        """Call this on all ranks when everything is wrapped, before the first step."""
        self.model, self.engine = trained, engine
        self.before = weights(trained)
        if world()[0] == 0:  # a refusal after this was not before training
            self.out.write_text(json.dumps({"finished": False}))

    def step(self, loss: Any) -> None:
        """Call this after each optimizer step."""
        self.losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if not torch.cuda.is_available():
            return
        if len(self.losses) == STEPS:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()
        elif len(self.losses) == STEPS + PROFILED:
            torch.cuda.synchronize()
            self.profiler.stop()
            for event in self.profiler.events():
                if PRODUCT.search(event.name) and not NONE.search(event.name):
                    found = self.products.setdefault(event.name, [0, 0.0])
                    found[0] += 1
                    found[1] += event.device_time

    def end(self) -> None:
        """Call this on all ranks."""
        after = weights(self.model)
        agree = scales_agree(self.model)
        unchanged = [name for name, weight in after.items() if torch.equal(weight, self.before[name])]
        if world()[0] != 0:
            return
        work = sum(time for _, time in self.products.values())
        fp8 = {name: each for name, each in self.products.items() if FP8.search(name)}
        facts = {
            "finished": True,
            "parameters": len(after),
            "scales_agree": agree,
            "kept_in_fp8": sum(hasattr(own, "_quantizer") for own in self.model.parameters()),
            "gathered_in_fp8": sum(hasattr(_local(own), "_tensor") for own in self.model.parameters()),
            "unchanged": unchanged,
            "reduced_in": reduced_in(self.model, self.engine),
            "losses": [float(loss) for loss in self.losses],
            "fp8_share": sum(time for _, time in fp8.values()) / work if work else None,
            "fp8_kernels_per_step": sum(count for count, _ in fp8.values()) / PROFILED,
            "kernels_per_step": sum(count for count, _ in self.products.values()) / PROFILED,
            "kernels": sorted(self.products, key=lambda name: -self.products[name][1])[:6],
        }
        self.out.write_text(json.dumps(facts))


def weights(trained: nn.Module) -> dict[str, torch.Tensor]:
    """Return what the optimizer updates, by name: full FP32 weights, or the shard of this rank under FSDP2."""
    import contextlib

    from torch.distributed.fsdp import FullyShardedDataParallel

    trained = getattr(trained, "_orig_mod", trained)  # of a compiled model
    whole: Any = contextlib.nullcontext()
    if isinstance(trained, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(trained, writeback=False)
    with whole, torch.no_grad():
        return {name: _full(own) for name, own in trained.named_parameters() if own.requires_grad}


def _full(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        parameter = safe_get_full_fp32_param(parameter)
    local = _local(parameter.detach())
    held: torch.Tensor = getattr(local, "_tensor", local)
    return held.float().cpu().clone()


def _local(parameter: Any) -> Any:
    """Return the shard of this rank; it is in torchao's wrapper (`_tensor`) if it is all-gathered in FP8."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def scales_agree(trained: nn.Module) -> bool | None:
    """True if delayed scaling has the same scales on all ranks; None without any. Call this on all ranks."""
    metas = [getattr(module, "fp8_meta", {}).get("scaling_fwd") for module in trained.modules()]
    own = [meta.scale.tolist() for meta in metas if hasattr(meta, "amax_history")]
    if not own or world()[1] == 1:
        return None
    every: list[Any] = [None] * world()[1]
    torch.distributed.all_gather_object(every, own)
    return all(each == own for each in every)


def reduced_in(trained: Any, engine: Any) -> str:
    """Return the dtype in which the engine reduces gradients; DDP and a single process use that of the gradients."""
    if engine is not None:
        return str(engine.communication_data_type).removeprefix("torch.")
    fsdp1, fsdp2 = getattr(trained, "mixed_precision", None), getattr(trained, "_get_fsdp_state", None)
    if fsdp1 is not None:
        return str(fsdp1.reduce_dtype).removeprefix("torch.")
    if fsdp2 is not None:
        return str(fsdp2()._mp_policy.reduce_dtype).removeprefix("torch.")
    return ", ".join(sorted({str(own.dtype).removeprefix("torch.") for own in trained.parameters()}))
