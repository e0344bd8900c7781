"""Measure how often `mpguard compare` is wrong, on logs of small real trainings on the CPU.

    python benchmarks/compare.py train FOLDER                        # about 40 minutes on one core
    python benchmarks/compare.py judge FOLDER -o benchmarks/results/compare.json

The model is a character MLP on the text of Python's language reference (`pydoc_data.topics`), 1,500 steps of AdamW, at
a learning rate at which runs are chaotic: a relative change of 1e-3 in the starting weights ends in another
trajectory. Members of one recipe train side by side in batched products; each has weights, batches and an optimizer
state of its own.

Null pairs, in which nothing is worse: the starting weights changed by 1e-6 and by 1e-3, BF16 autocast against another
BF16 run, other starting weights, another order of the batches. Spoiled: the loss of each null run times 1.01 (and, for
the other direction, 0.99), and real runs whose products are computed from FP8 (E5M2) or from 5 bits. Diverged: a loss
that became NaN, a learning rate that is far too large, an FP16 overflow, and FP16 or BF16 weights that lose updates.

Each run also logs the loss of another batch, which it does not train on. By it the mean difference of two runs is
measured twice with independent chance, which shows how often the interval is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from mpguard.compare import Criteria, RunLog, RunVerdict, compare
from mpguard.compare.intervals import block_mean_estimate

STEPS, BATCH, CONTEXT, EMBED, HIDDEN = 1500, 64, 12, 16, 128
#: The test was made on the runs of the first orders and seeds, and is judged on others.
TUNED, JUDGED = range(20), range(20, 60)
#: Parts of these seeds, whose counts are shown too: those that were looked at first, and the rest.
PARTS = {"seeds 0 to 19, tuned": TUNED, "seeds 20 to 39": JUDGED[:20], "seeds 40 to 59": JUDGED[20:]}
#: Runs that are trained side by side.
TOGETHER = 10
RATE = 1e-2
WARM_UP = Criteria().warm_up.last(range(1, STEPS + 1))
Losses = list[tuple[float, float]]


def train(members: Sequence[dict[str, Any]], recipe: dict[str, Any], steps: int) -> list[Losses]:
    """Train members side by side; each has `weights` (a seed), `order` (a seed), `noise` and `noise_seed`.

    Return for each member the losses of its batch and of one that it does not train on, step by step.
    """
    import torch
    import torch.nn.functional as F

    text = "\n".join(topics[name] for name in sorted(topics))
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    data, size, count = torch.tensor([known[character] for character in text]), len(known), len(members)
    shapes = {"a": (CONTEXT * EMBED, HIDDEN), "b": (HIDDEN, HIDDEN), "c": (HIDDEN, size)}

    def weights(member: dict[str, Any]) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(member.get("weights", 0))
        found = {"embedding": torch.randn(size, EMBED, generator=draw)}
        for name, (rows, columns) in shapes.items():
            found[name] = (torch.rand(rows, columns, generator=draw) * 2 - 1) / math.sqrt(rows)
            found[f"{name}_bias"] = torch.zeros(1, columns)
        draw = torch.Generator().manual_seed(member.get("noise_seed", 0) + 12345)
        noise = member.get("noise", 0.0)
        return {name: value * (1 + noise * torch.randn(value.shape, generator=draw)) for name, value in found.items()}

    dtype = getattr(torch, recipe.get("dtype", "float32"))
    starts = [weights(member) for member in members]
    params = {name: torch.stack([start[name] for start in starts]).to(dtype).requires_grad_() for name in starts[0]}
    optimizer = torch.optim.AdamW(params.values(), lr=0.0)
    batches = [torch.Generator().manual_seed(1000 + member.get("order", 0)) for member in members]
    others = [torch.Generator().manual_seed(500_000 + member.get("order", 0)) for member in members]
    rows = torch.arange(count)[:, None, None]
    quantize = QUANTIZERS[recipe.get("products", "none")]
    losses: list[Losses] = [[] for _ in members]

    def loss_of(draws: Sequence[Any], step: int) -> Any:
        start = torch.stack([torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw) for draw in draws])
        inputs, labels = data[start[..., None] + torch.arange(CONTEXT)], data[start + CONTEXT]
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.get("autocast", False)):
            hidden = params["embedding"][rows, inputs].reshape(count, BATCH, CONTEXT * EMBED)
            for name in shapes:
                hidden = torch.baddbmm(params[f"{name}_bias"], quantize(hidden), quantize(params[name]))
                hidden = F.gelu(hidden) if name != "c" else hidden
        if step >= recipe.get("overflow", steps):  # logits beyond FP16
            hidden = (hidden * 1e5).half()
        loss = F.cross_entropy(hidden.float().flatten(0, 1), labels.flatten(), reduction="none")
        return loss.view(count, BATCH).mean(1)

    for step in range(steps):
        share = min(1, (step + 1) / 50) * (0.45 * (1 + math.cos(math.pi * step / steps)) + 0.1)
        optimizer.param_groups[0]["lr"] = recipe.get("rate", RATE) * share
        with torch.no_grad():
            other = loss_of(others, step)
        loss = loss_of(batches, step)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        for own, value in zip(losses, zip(loss.tolist(), other.tolist(), strict=True), strict=True):
            own.append(value)
    return losses


def _rounded(to: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that rounds a tensor in the forward pass only."""
    return lambda tensor: tensor + (to(tensor.detach()) - tensor.detach())


def _e5m2(tensor: Any) -> Any:
    import torch

    scale = 57344 / tensor.abs().amax().clamp(min=1e-12)
    return (tensor * scale).to(torch.float8_e5m2).to(tensor.dtype) / scale


def _bits(tensor: Any, bits: int) -> Any:
    scale = (2 ** (bits - 1) - 1) / tensor.abs().amax().clamp(min=1e-12)
    return (tensor * scale).round() / scale


QUANTIZERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda tensor: tensor,
    "e5m2": _rounded(_e5m2),
    "5 bits": _rounded(lambda tensor: _bits(tensor, 5)),
}
NOISE = ("base", "base again", "noise 1e-6", "noise 1e-3")
SPOILED = ("bf16 weights", "e5m2 products", "5-bit products")
PLAN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "base again": ({"noise": 1e-6, "noise_seed": 50}, {}),
    "noise 1e-6": ({"noise": 1e-6, "noise_seed": 1}, {}),
    "noise 1e-3": ({"noise": 1e-3, "noise_seed": 2}, {}),
    "other weights": ({"weights": 1}, {}),
    "other order": ({"order": 100}, {}),
    "bf16": ({}, {"autocast": True}),
    "bf16, noise": ({"noise": 1e-3, "noise_seed": 3}, {"autocast": True}),
    "e5m2 products": ({}, {"products": "e5m2"}),
    "5-bit products": ({}, {"products": "5 bits"}),
    "rate x 30": ({}, {"rate": 30 * RATE}),
    "overflow": ({}, {"overflow": 700}),
    "bf16 weights": ({}, {"dtype": "bfloat16"}),
    "fp16 weights": ({}, {"dtype": "float16"}),
}


def train_all(folder: Path, kinds: Sequence[str], orders: Sequence[int]) -> None:
    """Train members of the plan for each order of batches, and write a CSV file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        started = time.perf_counter()
        changes, recipe = PLAN[kind]
        members = []
        for order in orders:
            own = {"order": order + changes.get("order", 0), "weights": 10 * order + changes.get("weights", 0)}
            members.append({**changes, **own})
        for order, losses in zip(orders, train(members, recipe, STEPS), strict=True):
            lines = [f"{step},{own!r},{other!r}" for step, (own, other) in enumerate(losses, 1)]
            _path(folder, kind, order).write_text("\n".join(["step,loss,other", *lines]) + "\n")
        print(f"{kind}: {time.perf_counter() - started:.0f} s", flush=True)


def _read(
    folder: Path, kinds: Iterable[str], orders: Sequence[int], column: str = "loss"
) -> dict[tuple[str, int], RunLog]:
    from mpguard.compare.readers import read_run

    return {(kind, order): read_run(_path(folder, kind, order), loss=column) for kind in kinds for order in orders}


def _path(folder: Path, kind: str, order: int) -> Path:
    return folder / f"{kind.replace(' ', '_')}-{order}.csv"


def _pairs(kinds: Sequence[str]) -> list[tuple[str, str]]:
    return list(itertools.combinations(kinds, 2))


def judge_all(folder: Path, orders: Sequence[int]) -> dict[str, Any]:
    """Return how often each verdict was given, for each kind of pair."""
    runs = _read(folder, PLAN, orders)
    null = list(_null_pairs(runs, orders))
    found = {"null pairs": _counts((kind, _verdict(run, base)) for kind, run, base in null)}
    worse = [(kind, _scaled(run, 1.01), base) for kind, run, base in null if kind != "other order"]
    found["loss times 1.01"] = _counts((kind, _verdict(run, base)) for kind, run, base in worse)
    better = [(kind, _scaled(run, 0.99), base) for kind, run, base in null if not kind.startswith("other")]
    found["loss times 0.99"] = _counts((kind, _verdict(run, base)) for kind, run, base in better)
    for title, kinds in {
        "spoiled": SPOILED,
        "diverged": ("rate x 30", "overflow", "fp16 weights"),
    }.items():
        found[title] = _counts(
            (kind, _verdict(runs[kind, order], runs["base", order])) for kind in kinds for order in orders
        )
    paired = [(kind, run, base) for kind, run, base in worse if kind != "other weights"]
    found["loss times 1.01, beyond the margin by their means"] = sum(_gap(run, base) > 0.005 for _, run, base in paired)
    for title, factor in (("every tenth step", 1.0), ("every tenth step, loss times 1.01", 1.01)):
        found[title] = _counts(
            (kind, _verdict(_scaled(_every_tenth(run), factor), _every_tenth(base), same_start=True))
            for kind, run, base in null
            if not kind.startswith("other")
        )
    found["five pairs of seeds"] = _counts(_arms_of_five(runs, orders))
    return found


def _arms_of_five(runs: dict[tuple[str, int], RunLog], seeds: Sequence[int]) -> Iterator[tuple[str, RunVerdict]]:
    """Yield verdicts on arms of five orders each, paired with the same orders, or with the other five."""
    kinds = ["base again", "noise 1e-3", "bf16", "other weights", "other order", *SPOILED]
    groups = [seeds[first : first + 5] for first in range(0, len(seeds), 5)]
    for kind, (orders, others) in itertools.product(kinds, zip(groups, groups[1:] + groups[:1], strict=True)):
        for title, base in (("paired", orders), ("separate", others)):
            arms = {"run": [runs[kind, order] for order in orders], "base": [runs["base", order] for order in base]}
            yield f"{kind}, {title}", compare(arms, "base").verdicts[0]


def _null_pairs(runs: dict[tuple[str, int], RunLog], orders: Sequence[int]) -> Iterator[tuple[str, RunLog, RunLog]]:
    for order in orders:
        for one, other in _pairs(NOISE):
            yield f"{other} / {one}", runs[other, order], runs[one, order]
        yield "bf16 twice", runs["bf16, noise", order], runs["bf16", order]
        yield "bf16 / fp32", runs["bf16", order], runs["base", order]
        yield "other weights", runs["other weights", order], runs["base", order]
        yield "other order", runs["other order", order], runs["base", order]


def _verdict(run: RunLog, base: RunLog, same_start: bool = False) -> RunVerdict:
    return compare({"run": [run], "base": [base]}, "base", Criteria(same_start=same_start)).verdicts[0]


def _gap(run: RunLog, base: RunLog) -> float:
    """Return the difference of two mean losses after the warm-up, as a share of the second."""
    ours, theirs = ([value for step, value in log.loss.items() if step > WARM_UP] for log in (run, base))
    return sum(ours) / sum(theirs) - 1


def _scaled(run: RunLog, factor: float) -> RunLog:
    """A run whose loss is another from step 51 on: the first ones show that it had the same start."""
    loss = {step: value * (factor if step > 50 else 1) for step, value in run.loss.items()}
    return RunLog(run.name, run.path, run.source, loss)


def _every_tenth(run: RunLog) -> RunLog:
    """The log as the Trainer writes it with `logging_steps=10`: the means of ten steps."""
    loss = {last: sum(run.loss[step] for step in range(last - 9, last + 1)) / 10 for last in range(10, STEPS + 1, 10)}
    return RunLog(run.name, run.path, run.source, loss)


def _counts(verdicts: Iterator[tuple[str, RunVerdict]]) -> dict[str, Any]:
    counted: dict[str, Counter[str]] = {}
    differences: dict[str, list[float]] = {}
    for kind, verdict in verdicts:
        counted.setdefault(kind, Counter())[verdict.verdict] += 1
        if verdict.difference is not None:
            differences.setdefault(kind, []).append(verdict.difference)
    total: Counter[str] = sum(counted.values(), Counter())
    return {
        "all": dict(total),
        "kinds": {kind: dict(each) for kind, each in counted.items()},
        "mean difference": {kind: round(sum(each) / len(each), 5) for kind, each in differences.items()},
    }


def smoothed_false_alarms(folder: Path) -> dict[str, float]:
    """Return how often a t-test at 5 % finds a difference in pairs that differ by noise: what others do, and ours."""
    runs = _read(folder, NOISE, JUDGED)
    alarms: Counter[str] = Counter()
    pairs = 0
    for order in JUDGED:
        for one, other in _pairs(NOISE):
            gaps = _gaps(runs[one, order], runs[other, order])
            smooth = [sum(gaps[i : i + 50]) / 50 for i in range(len(gaps) - 49)]
            pairs += 1
            for name, values in (("raw", gaps), ("smoothed", smooth)):
                mean = sum(values) / len(values)
                spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
                alarms[f"t-test, {name}"] += abs(mean) > 1.96 * spread
            estimate = block_mean_estimate(gaps)
            alarms["blocks, no margin"] += abs(estimate.mean) > estimate.half_width(0.025)
    return {name: round(count / pairs, 3) for name, count in sorted(alarms.items())}


def _gaps(run: RunLog, base: RunLog) -> list[float]:
    return [value - base.loss[step] for step, value in run.loss.items() if step > WARM_UP]


def wrong_intervals(folder: Path) -> dict[str, float]:
    """Return how often the 90 % interval of the mean difference is wrong, by a second measurement with other batches.

    Both have an error of the same size, so their difference has that of both: 10 % of such intervals must not have 0.
    """
    runs, again = (_read(folder, (*NOISE, "bf16", "bf16, noise"), JUDGED, column) for column in ("loss", "other"))
    pairs = [*_pairs(NOISE), ("bf16", "bf16, noise"), ("base", "bf16")]
    wrong = 0
    for order, (one, other) in itertools.product(JUDGED, pairs):
        first, second = (block_mean_estimate(_gaps(logs[one, order], logs[other, order])) for logs in (runs, again))
        both = math.hypot(first.half_width(0.05), second.half_width(0.05))
        wrong += abs(first.mean - second.mean) > both
    return {"stated": 0.1, "found": round(wrong / len(pairs) / len(JUDGED), 3)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PLAN, default=list(PLAN), metavar="KIND")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*TUNED, *JUDGED], metavar="SEED")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    if options.action == "train":
        for first in range(0, len(options.seeds), TOGETHER):
            train_all(options.folder, options.only, options.seeds[first : first + TOGETHER])
        return 0
    found = judge_all(options.folder, JUDGED)
    found["parts"] = {
        title: {name: each["all"] if isinstance(each, dict) else each for name, each in part.items()}
        for title, part in ((title, judge_all(options.folder, seeds)) for title, seeds in PARTS.items())
    }
    found["intervals that are wrong"] = wrong_intervals(options.folder)
    found["alarms of other tests on pairs that differ by noise"] = smoothed_false_alarms(options.folder)
    found["machine"] = {
        "python": platform.python_version(),
        "torch": _torch(),
        "runs": len(PLAN) * (len(TUNED) + len(JUDGED)),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0


def _torch() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    sys.exit(main())
