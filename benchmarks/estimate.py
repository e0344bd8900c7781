"""Compare `mpguard estimate` with real training steps on one GPU: the peak of the allocator, and what fits.

    python benchmarks/estimate.py [--only NAME ...] [-o benchmarks/results/estimate.json]
    python benchmarks/estimate.py --dry-run      # small models on the CPU: the programs run; nothing is compared

Each case, in a process of its own, trains a model of random weights for three steps, and compares
`torch.cuda.max_memory_allocated` with the estimate: 5 % (10 % compiled or in FP8). Then the allocator is limited to
shares of the estimate: 95 % must run out of memory, and `trains_at` is the least share that trains; what is above
100 % was lost to fragments. `fits` is true if that is at most what `mpguard estimate` counts, `needed`. Needs one GPU
with 80 GB, and about four minutes. With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it shows what that saves.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mpguard
from mpguard.estimate import ModelConfig, Request, built_in, estimate
from mpguard.estimate.adapters import Adapters
from mpguard.estimate.gpus import of_this_machine

_SMALL_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run. lora: the rank of PEFT's adapters on all Linear layers. needs: a module without which it is left
    out."""

    model: str
    recipe: str = "bf16_mixed"
    batch: int = 4
    length: int = 2048
    strategy: str = "single"
    optimizer: str = "adamw"
    checkpointing: bool = False
    compiled: bool = False
    layers: int | None = None
    lora: int | None = None
    needs: str = "transformers"

    @property
    def tolerance(self) -> float:
        return 0.10 if self.compiled or "fp8" in self.recipe else 0.05

    def config(self) -> ModelConfig:
        values = dict(_SMALL_MOE if self.model == "small-moe" else built_in()[self.model])
        if self.layers is not None:
            values["num_hidden_layers"] = self.layers
        return ModelConfig(values, self.model)


CASES: Mapping[str, Case] = {
    "llama": Case("llama-3.2-1b"),
    "llama-long": Case("llama-3.2-1b", batch=1, length=8192),
    "llama-checkpointing": Case("llama-3.2-1b", batch=8, checkpointing=True),
    "llama-bf16-full": Case("llama-3.2-1b", "bf16_full"),
    "llama-adafactor": Case("llama-3.2-1b", optimizer="adafactor", batch=2),
    "llama-fsdp2": Case("llama-3.2-1b", strategy="fsdp2"),
    "llama-zero2": Case("llama-3.2-1b", strategy="deepspeed-zero2", needs="deepspeed"),
    "llama-compiled": Case("llama-3.2-1b", compiled=True, layers=4, batch=8),
    "llama-bf16-full-compiled": Case("llama-3.2-1b", "bf16_full", compiled=True, layers=4, batch=8),
    "llama-fp8-delayed": Case("llama-3.2-1b", "bf16_with_fp8_delayed_scaling_mixed", needs="transformer_engine"),
    "qwen-large-vocabulary": Case("qwen2.5-0.5b"),
    "pythia-sgd": Case("pythia-1.4b", optimizer="sgd"),
    "pythia-fp32": Case("pythia-1.4b", "fp32", batch=2, length=1024),
    "gpt2-dropout": Case("gpt2-medium", batch=16, length=1024),
    "gemma": Case("gemma-3-1b", batch=2),
    "opt-checkpointing": Case("opt-1.3b", batch=8, checkpointing=True),
    "experts": Case("small-moe", batch=8),
    "bert": Case("bert-large", batch=32, length=512),
    "vit": Case("vit-large", batch=64),
    "llama-lora": Case("llama-3.2-1b", lora=16, needs="peft"),
    "llama-lora-checkpointing": Case("llama-3.2-1b", lora=16, batch=8, checkpointing=True, needs="peft"),
    "llama-lora-bf16-fused": Case("llama-3.2-1b", "bf16_full", lora=64, optimizer="adamw-fused", needs="peft"),
    "llama-fused": Case("llama-3.2-1b", optimizer="adamw-fused"),
    "llama-bf16-states": Case("llama-3.2-1b", optimizer="adamw-bf16"),
    "llama-8bit-states": Case("llama-3.2-1b", optimizer="adamw8bit", needs="torchao"),
    "llama-fsdp2-fused-checkpointing": Case(
        "llama-3.2-1b", strategy="fsdp2", optimizer="adamw-fused", batch=8, checkpointing=True
    ),
    "qwen-fused-checkpointing": Case("qwen2.5-0.5b", optimizer="adamw-fused", batch=8, checkpointing=True),
}

#: Shares of the estimate to which the allocator is limited. The first must be too little.
SHARES = (0.95, 1.0, 1.02, 1.05, 1.1, 1.2)

#: Bytes that may stay in use after a run: the workspaces of cuBLAS and Transformer Engine.
LEFT = 512 * 1024**2

_HEADS = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}


def built(case: Case, config: ModelConfig, policy: mpguard.Policy, device: str) -> Any:
    """Return the model on the device in the policy's dtype of parameters; the base of adapters in its compute dtype."""
    import torch
    import transformers

    values = dict(config.values)
    kind = values.pop("model_type")
    made = transformers.CONFIG_MAPPING[kind](**values)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    name = _HEADS.get(kind, "AutoModelForCausalLM")
    dtype = policy.master_dtype if case.lora is None else policy.compute_dtype
    with torch.device(device):
        model = getattr(transformers, name).from_config(made, dtype=dtype.torch)
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    if case.lora is not None:
        import peft

        if case.checkpointing:
            model.enable_input_require_grads()  # else no gradient reaches the adapters
        adapters = peft.LoraConfig(r=case.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=policy.master_dtype is mpguard.Dtype.FP32)
    return model


def batch_of(case: Case, config: ModelConfig, policy: mpguard.Policy, device: str) -> dict[str, Any]:
    import torch

    if config.architecture == "vit":
        image = config.size("image_size")
        pixels = torch.randn(case.batch, 3, image, image, device=device, dtype=policy.master_dtype.torch)
        return {"pixel_values": pixels, "labels": torch.zeros(case.batch, dtype=torch.long, device=device)}
    ids = torch.randint(5, config.size("vocab_size") - 1, (case.batch, case.length), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def stepper(case: Case, config: ModelConfig, device: str, ending: ExitStack) -> Callable[[], None]:
    """Return a function that trains for one step. ending: gets what must be called to release the memory."""
    import torch

    policy = mpguard.recipe(case.recipe).decided()
    model, batch = built(case, config, policy, device), batch_of(case, config, policy, device)
    if case.strategy == "deepspeed-zero2":
        return _deepspeed(model, batch, policy, ending)
    if case.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy.to("fsdp2"))
        fully_shard(model, mp_policy=policy.to("fsdp2"))
    if policy.fp8:
        mpguard.convert(model, policy)
    run = torch.compile(model) if case.compiled else model
    optimizer = _optimizer(case.optimizer, [own for own in model.parameters() if own.requires_grad])
    autocast = policy.to("torch").autocast(device)
    autocast["enabled"] = autocast["enabled"] and case.strategy == "single"

    def step() -> None:
        with torch.autocast(**autocast):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _optimizer(name: str, parameters: list[Any]) -> Any:
    import torch

    if name == "adamw8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-5)
    if name == "adamw-bf16":
        return _bf16_states(torch.optim.AdamW(parameters, lr=1e-5, fused=True))
    return {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-5),
        "adamw-fused": lambda: torch.optim.AdamW(parameters, lr=1e-5, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-5, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=1e-5),
    }[name]()


def _bf16_states(optimizer: Any) -> Any:
    """Return an AdamW whose states are BF16, updated tensor by tensor: the memory of optimizers that have such ones."""
    import torch

    def step() -> None:
        for group in optimizer.param_groups:
            for own in group["params"]:
                state = optimizer.state[own]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(own, dtype=torch.bfloat16))
                state["exp_avg"].lerp_(own.grad.bfloat16(), 0.1)
                state["exp_avg_sq"].lerp_(own.grad.bfloat16().square_(), 0.001)
                own.data.add_(state["exp_avg"], alpha=-1e-5)

    optimizer.step = step
    return optimizer


def _deepspeed(model: Any, batch: dict[str, Any], policy: mpguard.Policy, ending: ExitStack) -> Callable[[], None]:
    import deepspeed
    import torch

    config = {
        **policy.to("deepspeed", "deepspeed-zero2"),
        "train_micro_batch_size_per_gpu": next(iter(batch.values())).shape[0],
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ending.callback(engine.destroy)  # its hooks on the parameters keep it alive, with all states

    def step() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return step


@contextmanager
def lowered_experts() -> Iterator[None]:
    """Experts under autocast are what mpguard makes of them."""
    from transformers.integrations import moe

    from mpguard.nn.grouped_mm import autocast_grouped_mm

    before = moe._grouped_mm
    moe._grouped_mm = autocast_grouped_mm(before)
    try:
        yield
    finally:
        moe._grouped_mm = before


def peak(case: Case, config: ModelConfig, limit: int | None = None) -> int | None:
    """Return the peak of three steps; None if the memory was not enough. limit: bytes that the allocator may take.

    Raises `RuntimeError` if an earlier run still has memory: the limit would be that of two runs.
    """
    import torch

    if limit is not None and torch.cuda.memory_allocated() > LEFT:
        raise RuntimeError(f"{torch.cuda.memory_allocated():,} bytes of the run before are still in use")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(1.0, limit / total))
    found = _trained(case, config)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def _trained(case: Case, config: ModelConfig) -> int | None:
    """Train for three steps, and return their peak; None if the memory was not enough."""
    import torch

    with ExitStack() as ending:
        try:
            step = stepper(case, config, "cuda", ending)
            for number in range(3):
                if number == 1:  # the first step allocates what stays
                    torch.cuda.reset_peak_memory_stats()
                step()
            torch.cuda.synchronize()
            return int(torch.cuda.max_memory_allocated())
        except torch.cuda.OutOfMemoryError:
            return None


def request_of(case: Case, config: ModelConfig) -> Request:
    return Request(
        config, mpguard.recipe(case.recipe).decided(), case.strategy, 1, case.batch, case.length, case.optimizer,
        case.checkpointing, case.compiled, gpu=of_this_machine() or "h100",
        adapters=None if case.lora is None else Adapters(case.lora),
    )  # fmt: skip


def compared(case: Case) -> dict[str, Any]:
    """Return estimate and measurement of a case, and whether the limits did what the estimate says."""
    config = case.config()
    found, began = estimate(request_of(case, config)), time.perf_counter()
    real = peak(case, config)
    result = {
        **dataclasses.asdict(case),
        "estimated": found.allocated,
        "measured": real,
        "error": None if real is None else round(found.allocated / real - 1, 4),
        "tolerance": case.tolerance,
        "peak": found.peak,
        "moments": {name: sum(parts.values()) for name, parts in found.moments.items()},
    }
    if not case.compiled:  # compiling again and again takes minutes
        needed = round((found.needed - found.per_gpu["context"]) / found.allocated, 4)
        shares = sorted({*SHARES, needed})
        tried = (share for share in shares if peak(case, config, int(found.allocated * share)) is not None)
        trains_at = next(tried, None)
        result["needed"], result["trains_at"] = needed, trains_at
        result["fits"] = trains_at is not None and SHARES[0] < trains_at <= needed
    return result | {"seconds": round(time.perf_counter() - began, 1)}


def small(case: Case) -> tuple[Case, ModelConfig]:
    """Return a case of the same kind for the CPU."""
    config = copy.deepcopy(case.config())
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "n_embd": 128,
        "num_key_value_heads": 2, "n_layer": 2, "n_head": 4, "vocab_size": 512, "ffn_dim": 256, "head_dim": 32,
        "moe_intermediate_size": 64, "image_size": 32,
    }  # fmt: skip
    values = {key: sizes.get(key, value) for key, value in config.values.items()}
    return dataclasses.replace(case, batch=2, length=32), ModelConfig(values, case.model)


def context_bytes() -> int:
    """Return what this process takes on the GPU outside of torch's allocator, by NVML."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    mine = [
        each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if each.pid == os.getpid()
    ]
    return int(mine[0] - torch.cuda.memory_reserved()) if mine and mine[0] else 0


def _one_process() -> None:
    import torch
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=0, world_size=1)


def run_case(name: str, dry_run: bool) -> None:
    """Run a case in this process, and print its result as the last line."""
    _one_process()
    with lowered_experts():
        if dry_run:
            case, config = small(CASES[name])
            with ExitStack() as ending:
                stepper(case, config, "cpu", ending)()
            print(json.dumps({"estimated": estimate(request_of(case, config)).allocated}))
            return
        result = compared(CASES[name])
    print(json.dumps({**result, "context_bytes": context_bytes()}))


def in_child(name: str, dry_run: bool) -> dict[str, Any]:
    """Run a case in a process of its own; a failure is a result with its exception or exit status."""
    command = [sys.executable, __file__, "--case", name, *(["--dry-run"] if dry_run else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = re.findall(r"^\w[\w.]*(?:Error|Exception|Interrupt)\b.*", done.stderr, re.MULTILINE)
        result: dict[str, Any] = {"error": None, "failed": [f"exit status {done.returncode}", *errors][-1]}
    else:
        result = json.loads(done.stdout.splitlines()[-1])
    shown = ("estimated", "measured", "error", "trains_at", "seconds", "failed")
    print(name, json.dumps({key: result[key] for key in shown if key in result}), flush=True)
    return result


def is_wrong(result: dict[str, Any]) -> bool:
    """True if the estimate is outside of its tolerance, or does not say what fits."""
    outside = result["error"] is None or abs(result["error"]) > result["tolerance"]
    return outside or not result.get("fits", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dry-run", action="store_true", help="one step of small models on the CPU")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="cases at a time: each takes up to 55 GB")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "estimate.json")
    options = parser.parse_args()
    if options.case:
        run_case(options.case, options.dry_run)
        return 0
    missing = [name for name in options.only if importlib.util.find_spec(CASES[name].needs) is None]
    if missing:
        print(f"left out, a library is not installed: {', '.join(missing)}", file=sys.stderr)
    names = [name for name in options.only if name not in missing]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(names, pool.map(lambda name: in_child(name, options.dry_run), names), strict=True))
    failed = [name for name, result in results.items() if "failed" in result]
    if options.dry_run:
        return int(bool(failed))
    import torch

    wrong = [name for name, result in results.items() if is_wrong(result)]
    report = {
        "what": "peak of torch's allocator in steps 2 and 3 against `mpguard estimate`, one process, random weights",
        "cases": results,
        "wrong": wrong,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": {"gpu": torch.cuda.get_device_name(), "memory": torch.cuda.get_device_properties(0).total_memory},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "versions": {"python": platform.python_version(), **{
            name: importlib.metadata.version(name) for name in ("mpguard", "torch", "transformers")}},
    }  # fmt: skip
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{len(results) - len(wrong)} of {len(results)} within tolerance; outside: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
