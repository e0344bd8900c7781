"""Compare block-wise FP8 (a scale per 128 values) of torchao and of Transformer Engine with BF16: speed and error.

    python benchmarks/blockwise.py --output benchmarks/results/blockwise.json    # one Hopper GPU, below 4 minutes
    python benchmarks/blockwise.py --tiny                                        # tries the program itself on a CPU

Four blocks of Llama, forward and backward pass and a step of AdamW (fused). All arms are in memory, and take turns: a
round is some steps of each, each step timed by itself with CUDA events. `ratio` is the time of BF16, compiled, divided
by that of an arm, by the means and by the medians. `output` and `gradient` are the relative distance of the first
pass's output, and of the gradient of the first block's up projection for the same gradient of the output, from those
of BF16, with the same values. torchao's arm takes minutes to build with empty caches: Triton compiles 45 candidates of
each kernel that rounds. Run it once before with `--seconds 400`.

An arm that does not fit into `--seconds` any more is left out, and the result says so.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import device, device_name, synchronize, versions

LIBRARIES = ("torch", "transformers", "torchao", "transformer-engine", "triton", "mpguard")

#: Hidden size, FFN, heads, key and value heads; sequences and their length.
SIZE, BATCH = (4096, 14336, 32, 8), (2, 4096)
TINY = (64, 128, 4, 2), (1, 32)
BLOCKS = 4

#: Name -> fields of the policy; None for BF16. Those that matter most come first.
ARMS: dict[str, dict[str, Any] | None] = {
    "bf16, compiled": None,
    "torchao block-wise, compiled": {"fp8_recipe": "blockwise", "backend": "torchao"},
    "te block-wise": {"fp8_recipe": "blockwise", "backend": "te"},
    "torchao tensorwise, compiled": {"fp8_recipe": "tensorwise", "backend": "torchao"},
    "te block-wise, compiled": {"fp8_recipe": "blockwise", "backend": "te"},
}
TINY_ARMS: dict[str, dict[str, Any] | None] = {
    "bf16, compiled": None,
    "torchao tensorwise, compiled": {"fp8_recipe": "tensorwise", "backend": "torchao", "fp8_emulate": True},
    "torchao block-wise, compiled": {"fp8_recipe": "blockwise", "backend": "torchao"},
}
BASELINE = "bf16, compiled"

WARM_UP, ROUNDS, STEPS = 4, 5, 8

#: What one more arm is expected to take: to be built and compiled, and its share of the rounds.
SECONDS_OF_ARM = 45.0


class Arm:
    """Four blocks with an optimizer, and a function that runs a step."""

    def __init__(self, name: str, fields: dict[str, Any] | None, size: tuple[int, ...], batch: tuple[int, int]) -> None:
        import torch
        from transformers import LlamaConfig, LlamaModel

        import mpguard

        hidden, ffn, heads, groups = size
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=groups,
            num_hidden_layers=BLOCKS, vocab_size=16, max_position_embeddings=batch[1], use_cache=False,
            attn_implementation="sdpa",
        )  # fmt: skip
        with torch.device(device()):
            self.model: Any = LlamaModel(config).train()
            self.inputs = torch.randn(*batch, hidden)  # FP32, as embeddings are under autocast
            self.gradient = torch.randn(*batch, hidden)  # not the output: its norm is constant, and has no gradient
        self.model.embed_tokens.requires_grad_(False)
        self.watched = self.model.layers[0].mlp.up_proj
        if fields is not None:
            policy = mpguard.Policy(bf16=True, fp8="e4m3", compile=False, **fields)
            self.report = str(mpguard.convert(self.model, policy)).splitlines()[0]
        compiled = name.endswith(", compiled")
        backend = "inductor" if device() == "cuda" else "aot_eager"
        self.run = torch.compile(self.model, backend=backend, dynamic=False) if compiled else self.model
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device() == "cuda")

    def forward_backward(self) -> Any:
        import torch

        with torch.autocast(device(), dtype=torch.bfloat16):
            out = self.run(inputs_embeds=self.inputs).last_hidden_state
        out.backward(self.gradient.to(out.dtype))
        return out

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def free(self) -> None:
        """Free what only a step needs: gradients and the optimizer's states, which the next step makes again."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()


def timed(step: Callable[[], None]) -> float:
    """Return the milliseconds of a step on the GPU; on a CPU those of the clock."""
    import torch

    if device() != "cuda":
        begun = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - begun)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def distance(found: Any, exact: Any) -> float:
    """Return the relative distance of two tensors in the Frobenius norm."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build the arms, compare their first passes, and time them in turns."""
    import torch

    begun = time.monotonic()
    size, batch = TINY if options.tiny else (SIZE, BATCH)
    arms: dict[str, Arm] = {}
    results: dict[str, dict[str, Any]] = {}
    exact: tuple[Any, Any] | None = None
    for name, fields in (TINY_ARMS if options.tiny else ARMS).items():
        left = options.seconds - (time.monotonic() - begun)
        if arms and not options.tiny and left < SECONDS_OF_ARM:
            results[name] = {"failed": f"left out: {left:.0f} s were left of {options.seconds:.0f}"}
            continue
        started, arm = time.monotonic(), None
        try:
            arm = Arm(name, fields, size, batch)
            output = arm.forward_backward()
            tensors = output.detach().clone(), arm.watched.weight.grad.detach().clone()
            arm.optimizer.zero_grad(set_to_none=True)
            for _ in range(WARM_UP):
                arm.step()
            synchronize()
            arm.free()
        except Exception as error:  # any error of a library is a result
            results[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            del arm, error
            gc.collect()
            if device() == "cuda":
                torch.cuda.empty_cache()
            continue
        exact = tensors if exact is None else exact
        errors = [round(distance(found, each), 5) for found, each in zip(tensors, exact, strict=True)]
        results[name] = {"output": errors[0], "gradient": errors[1], "built_s": round(time.monotonic() - started, 1)}
        results[name] |= {"converted": arm.report} if fields is not None else {}
        arms[name] = arm
        print(f"{name}: built in {results[name]['built_s']} s", file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(ROUNDS):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in names:
            arms[name].step()  # it makes the optimizer's states, and pays for the caches of the arm before
            times[name] += [timed(arms[name].step) for _ in range(STEPS)]
            arms[name].free()
    for name, each in times.items():
        base = times[BASELINE]
        results[name] |= {
            "mean_ms": round(statistics.mean(each), 3),
            "median_ms": round(statistics.median(each), 3),
            "ratio_mean": round(statistics.mean(base) / statistics.mean(each), 4),
            "ratio_median": round(statistics.median(base) / statistics.median(each), 4),
            "steps": len(each),
        }
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device_name(),
        "versions": versions(LIBRARIES),
        "blocks": BLOCKS,
        "size": dict(zip(("hidden", "ffn", "heads", "groups"), size, strict=True)),
        "batch": list(batch),
        "seconds": round(time.monotonic() - begun, 1),
        "arms": results,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results to this file")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no further arm after this (default: 200)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    options = parser.parse_args(arguments)
    result = measure(options)
    text = json.dumps(result, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, "utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
