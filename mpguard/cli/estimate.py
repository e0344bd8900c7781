"""Estimate the memory of a training run on each GPU, before it starts.

mpguard estimate llama-3.1-8b --gpus 8 --strategy fsdp2      a built-in model (--list)
mpguard estimate config.json --recipe bf16_mixed --seq 4096  a config.json of transformers, or its folder
mpguard estimate qwen3-8b --gpu h200 --checkpointing         the largest batch that fits on a GPU
mpguard estimate org/model --lora 16 --quantize nf4          a downloaded model of the Hugging Face Hub

Reads the model's config.json only: neither torch nor weights are needed for the architectures of --list. Others
are built by transformers, if it is installed, without memory. Exit status: 0 estimated, 2 the model is not known,
its config is not complete, or transformers cannot run it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mpguard.core.console import Line, columns, folded, print_message, printable, wrapped, write_lines
from mpguard.core.errors import ConfigError

if TYPE_CHECKING:
    from mpguard.estimate import Adapters, MemoryEstimate, Request

#: Part -> its name and color in the chart.
_PARTS = {
    "parameters": ("parameters", "blue"),
    "gradients": ("gradients", "magenta"),
    "master_weights": ("master weights", "bright_blue"),
    "optimizer": ("optimizer", "cyan"),
    "activations": ("activations", "green"),
    "logits": ("logits and loss", "yellow"),
    "buffers": ("buffers, copies", "white"),
    "fp8": ("FP8 weights", "red"),
    "context": ("CUDA context", "bright_black"),
}
_WIDTH = 40
_MOMENTS = {"forward": "end of the forward pass", "backward": "backward pass", "step": "optimizer step"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="config.json, a folder with one, a built-in name, or a downloaded model id",
    )
    parser.add_argument("--list", action="store_true", help="list the built-in models and the known architectures")
    parser.add_argument("--recipe", default="bf16_mixed", metavar="NAME", help="default: bf16_mixed")
    parser.add_argument("--strategy", metavar="NAME", help="default: single; with several GPUs fsdp2")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows per GPU and micro-batch (default: 1)")
    parser.add_argument(
        "--seq", type=int, metavar="L", help="tokens in a row (default: 2048, or the most that the model takes)"
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="adamw, adamw-fused, adamw-bf16 (states), adamw8bit, lion, sgd, muon, adafactor",
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank, and nothing else")
    parser.add_argument(
        "--targets", metavar="NAMES", help="the layers with adapters: q_proj,v_proj,... (default: all-linear)"
    )
    parser.add_argument(
        "--quantize", metavar="FORMAT", help="the frozen base is stored in nf4, int8 or fp8 (with --lora)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpoints of each block")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--offload", action="store_true", help="optimizer (and FSDP's shards) on the host")
    parser.add_argument("--gpu", metavar="NAME", help="the GPU, or its memory: 24GB (default: this machine's, or h100)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    from mpguard import estimate

    if options.list:
        _print_list(options.format)
        return 0
    if options.model is None:
        raise ConfigError(
            "estimate needs a model: a config.json, its folder, a downloaded model id, or a built-in name "
            "(`mpguard estimate --list`)"
        )
    request = _request(options)
    found = estimate.estimate(request)
    if request.config.has("quantization_config"):
        print_message(
            f"{request.config.path}: `quantization_config` is not counted: the estimate is for weights as the recipe "
            "has them"
        )
    if options.format == "json":
        print(json.dumps(found.as_json(), indent=2))
    else:
        options_that_fit = [] if found.fits(request.gpu) else estimate.what_fits(request)
        lines = _lines(found, estimate.fitting(request), estimate.largest_batch(request), options_that_fit)
        write_lines(part for line in lines for part in folded(line, 2, columns()))
    return 0


def _request(options: argparse.Namespace) -> Request:
    from mpguard.estimate import Request, most_positions, read_model
    from mpguard.estimate.gpus import architecture, memory_of, of_this_machine
    from mpguard.policy import hardware
    from mpguard.policy.recipes import AUTO, auto_on, recipe

    gpu = options.gpu or of_this_machine() or "h100"
    memory_of(gpu)  # the first question about a GPU that is not known
    policy = recipe(options.recipe)
    if policy.name.startswith(AUTO):
        policy = auto_on(hardware.named(architecture(gpu)))
    model = read_model(options.model)
    adapters = _adapters(options)
    length = options.seq if options.seq is not None else min(2048, most_positions(model) or 2048)
    return Request(
        model, policy.decided(), options.strategy or ("fsdp2" if options.gpus > 1 else "single"),
        options.gpus, options.batch, length, options.optimizer, options.checkpointing, options.compile,
        options.offload, gpu, adapters,
    )  # fmt: skip


def _adapters(options: argparse.Namespace) -> Adapters | None:
    from mpguard.estimate import Adapters

    if options.lora is None:
        for name in ("targets", "quantize"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} needs adapters: give their rank, such as --lora 16")
        return None
    names = tuple(name.strip() for name in (options.targets or "all-linear").split(",") if name.strip())
    return Adapters(options.lora, names, options.quantize)


def _print_list(form: str) -> None:
    from mpguard.estimate import FAMILIES, built_in

    if form == "json":
        print(json.dumps({"version": 1, "models": list(built_in()), "architectures": list(FAMILIES)}, indent=2))
        return
    print("Built-in models:\n  " + "\n  ".join(built_in()))
    print("Architectures (`model_type`) that need no torch:")
    print(wrapped(f"  {', '.join(FAMILIES)}", 2, columns()))
    print("Others: those that an installed transformers has.")


def _lines(found: MemoryEstimate, fitting: Mapping[str, list[str]], largest: int, options: list[str]) -> Iterator[Line]:
    from mpguard.estimate import PARTS

    request = found.request
    yield from _answer(found, options)
    extras = [word for word, on in (("checkpointing", request.checkpointing), ("compiled", request.compiled),
                                    ("offload", request.offload)) if on]  # fmt: skip
    trained = f", {_count(found.trained)} of them train" if request.adapters else ""
    yield [(printable(f"{request.config.path}: {_count(found.parameters)} parameters{trained}"), "bold")]
    what = [request.policy.name, request.strategy, f"{request.gpus} GPU{'s' * (request.gpus > 1)}",
            f"batch {request.batch} x {request.length} tokens", request.optimizer,
            *_adapter_words(request), *extras]  # fmt: skip
    yield [(" · ".join(what), "dim")]
    yield [("", "")]
    most, width = max(found.per_gpu.values()), min(_WIDTH, max(10, (columns() or 80) - 29))
    for part in PARTS:
        if size := found.per_gpu[part]:
            name, color = _PARTS[part]
            yield [(f"{name:16}{_size(size):>10}  ", ""), (_bar(size, most, width), color)]
    yield [("", "")]
    for moment, parts in found.moments.items():
        total = sum(parts.values()) + found.per_gpu["context"]
        mark = "  <- peak" if moment == found.peak else ""
        yield [(f"{_MOMENTS[moment]:24}{_size(total):>10}{mark}", "bold" if mark else "")]
    if found.host:
        yield [(f"{'memory of the host':24}{_size(found.host):>10}  per process", "")]
    yield [("", "")]
    yield from _fits(fitting)
    answer = f"largest batch: {largest} x {request.length} tokens" if largest else "not even a batch of 1 fits"
    yield [(f"On {request.gpu} ({request.strategy}): {answer}.", "bold")]


def _answer(found: MemoryEstimate, options: list[str]) -> Iterator[Line]:
    """Yield the answer to "does it fit": on the GPU of the request, and what would make it fit."""
    from mpguard.estimate.gpus import memory_of

    gpu = found.request.gpu
    size = memory_of(gpu) / 2**30
    if found.fits(gpu):
        yield [("fits: yes", "bold green"), (f", {found.total / 2**30:.0f} of {size:.0f} GiB on {gpu}", "bold")]
        return
    short = (found.needed - memory_of(gpu)) / 2**30
    yield [("fits: no", "bold red"), (f", short by {short:,.0f} GiB on {gpu} ({size:.0f} GiB; "
           f"{found.needed / 2**30:,.0f} needed with what the allocator loses)", "bold")]  # fmt: skip
    if options:
        yield [(f"  what would make it fit: {'; or '.join(options)}", "")]
    else:
        yield [("  no option that was tried makes it fit; take a smaller model or more GPUs", "")]


def _adapter_words(request: Request) -> list[str]:
    if request.adapters is None:
        return []
    own = request.adapters
    quantized = [f"base in {own.quantize}"] if own.quantize else []
    return [f"lora {own.rank} on {','.join(own.targets)}", *quantized]


def _fits(fitting: Mapping[str, list[str]]) -> Iterator[Line]:
    from mpguard.estimate.gpus import memory_of

    yield [("fits on", "bold")]
    for strategy, gpus in fitting.items():
        smallest = min(gpus, key=memory_of, default="")
        where = f"{smallest} ({memory_of(smallest) / 2**30:.0f} GiB) and larger" if gpus else "no single GPU listed"
        yield [(f"{strategy:16}", ""), (where, "green" if gpus else "red")]


def _bar(size: int, most: int, width: int) -> str:
    eighths = max(1, round(8 * width * size / most))
    whole, rest = divmod(eighths, 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest : rest + 1].strip()


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"


def _count(number: int) -> str:
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:,}"
