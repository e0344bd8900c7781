"""`mpguard init` without a recipe: a few questions, and the reasons for what is recommended.

The facts are those of `mpguard doctor` (what works here) and `mpguard estimate` (what fits). With `--yes` the defaults
are the answers; where there is no terminal and no `--yes`, nothing is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence

from mpguard import doctor
from mpguard.core.errors import ConfigError, MpguardError, did_you_mean
from mpguard.estimate import ModelConfig, Request, estimate, most_positions, read_model
from mpguard.estimate.gpus import architecture, memory_of, of_this_machine
from mpguard.policy import hardware
from mpguard.policy.recipes import recipe

FRAMEWORKS = ("accelerate", "deepspeed")
WISHES = ("speed", "accuracy", "memory")

#: Recipes to fall back to, in this order, where a better one does not work.
_FALLBACK = ("bf16_mixed", "fp16_mixed", "fp32")
_MOST_GPUS = 1024


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the user wants.

    gpu: a name of the table of GPUs; None: the CPU. gpus: how many. model: None if not known.
    """

    gpu: str | None
    gpus: int
    model: ModelConfig | None
    framework: str
    wish: str


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recipe and a strategy, each with the reason."""

    recipe: str
    strategy: str
    gpus: int
    reasons: tuple[str, ...]


def fill(options: argparse.Namespace) -> list[str]:
    """Set recipe, strategy, device and processes of the options, and return the reasons.

    Raises `ConfigError` where nothing can be asked, or if there is no answer.
    """
    asks = sys.stdin.isatty() and sys.stdout.isatty() and options.format == "text"
    if not asks and not options.yes:
        raise ConfigError(
            "init needs a recipe, and cannot ask for one here: this is no terminal. Name one (`mpguard recipes`), as "
            "in `mpguard init bf16_mixed`, or add --yes, which takes what is recommended for this machine"
        )
    found = recommend(_answers(options, None if options.yes else input), options.strategy)
    options.recipe, options.strategy = found.recipe, found.strategy
    options.device = options.device or ("gpu" if found.gpus else "cpu")
    options.num_processes = options.num_processes or max(1, found.gpus)
    return list(found.reasons)


def _answers(options: argparse.Namespace, read: Callable[[str], str] | None) -> Answers:
    """Return the answers. read: asks a question; None takes the defaults."""
    here = hardware.detect()
    default = "" if options.device == "cpu" else of_this_machine() or ""
    gpu = _ask(read, "GPU to train on, such as h100 (empty: the CPU)", default, _gpu)
    count = str(options.num_processes or max(1, here.gpus))
    gpus = int(_ask(read, "How many of them", count, _number)) if gpu else 0
    model = _ask(read, "Model: a config.json, or a built-in name (empty: not known)", options.model or "", _model)
    framework = _ask(read, f"Framework ({', '.join(FRAMEWORKS)})", FRAMEWORKS[0], _one_of(FRAMEWORKS))
    wish = _ask(read, f"What matters most ({', '.join(WISHES)})", WISHES[0], _one_of(WISHES))
    return Answers(gpu or None, gpus, read_model(model) if model else None, framework, wish)


def _ask(read: Callable[[str], str] | None, question: str, default: str, check: Callable[[str], None]) -> str:
    """Ask until the answer is valid. The default is that of an empty answer."""
    if read is None:
        check(default)
        return default
    while True:
        try:
            answer = read(f"{question} [{default}]: " if default else f"{question}: ").strip() or default
        except EOFError:
            raise ConfigError("init: the input ended before all questions were answered; nothing was written") from None
        try:
            check(answer)
        except MpguardError as error:
            print(f"  {error}")
        else:
            return answer


def _gpu(answer: str) -> None:
    if answer:
        memory_of(answer)


def _number(answer: str) -> None:
    if not answer.isdecimal() or not 1 <= int(answer) <= _MOST_GPUS:
        raise ConfigError(f"{answer} is not a number of GPUs; 1 to {_MOST_GPUS} is needed")


def _model(answer: str) -> None:
    if answer:
        _fitted(Answers(None, 1, read_model(answer), FRAMEWORKS[0], WISHES[0]), "fp32", "single")


def _one_of(known: Sequence[str]) -> Callable[[str], None]:
    def check(answer: str) -> None:
        if answer not in known:
            raise ConfigError(f"`{answer}` is not one of the answers{did_you_mean(answer, known)}")

    return check


def recommend(answers: Answers, strategy: str | None = None) -> Recommendation:
    """Return what fits the answers, and why. strategy: the one that is wanted."""
    name, why = _recipe(answers)
    chosen, reasons = (strategy, [f"strategy {strategy}: as asked"]) if strategy else _strategy(answers, name)
    return Recommendation(name, chosen, 1 if chosen == "single" and answers.gpus else answers.gpus, (why, *reasons))


def _recipe(answers: Answers) -> tuple[str, str]:
    if answers.gpu is None:
        return "fp32", "recipe fp32: the CPU computes BF16 in software"
    local = answers.gpu == of_this_machine()
    there = hardware.detect() if local else hardware.named(architecture(answers.gpu))
    best, reason = hardware.best(there)
    wanted = (best, *_FALLBACK) if answers.wish == "speed" or not recipe(best).low_bit_recipe else _FALLBACK
    accurate = f"the most accurate of the fast ones on {answers.gpu}"
    if not local:
        name = next(each for each in wanted if there.refuses(recipe(each)) is None)
        return name, f"recipe {name}: {reason if name == best else accurate}"
    cells = [each for each in doctor.diagnose(probe=False).cells if each.strategy == "single"]
    failed = ""
    for name in wanted:
        mine = [each for each in cells if each.recipe == name]
        if any(each.works for each in mine):
            why = reason if name == best else failed or accurate
            return name, f"recipe {name}: {why}"
        why_not = mine[0].reason if mine else "`mpguard doctor` has no check of it"
        failed = failed or f"{name} does not work here: {why_not}"
    return "fp32", f"recipe fp32: {failed}"


def _strategy(answers: Answers, name: str) -> tuple[str, list[str]]:
    """Return the first strategy that fits, the simplest first."""
    if answers.gpu is None:
        return "single", ["strategy single: one process on the CPU"]
    candidates = list(_candidates(answers))
    if answers.model is None:
        why = (
            "the simplest; with a model, what fits is estimated" if answers.wish != "memory" else "it shards everything"
        )
        return candidates[0], [f"strategy {candidates[0]}: {why}"]
    too_large: list[str] = []
    for each in candidates:
        total = _fitted(answers, name, each)
        size = f"{total / 2**30:.0f} GiB of {memory_of(answers.gpu) / 2**30:.0f} per GPU"
        if total <= memory_of(answers.gpu):
            return each, [*too_large, f"strategy {each}: estimated {size}, with one row and AdamW"]
        too_large.append(f"not {each}: estimated {size}")
    hint = "try --checkpointing, --offload or more GPUs in `mpguard estimate`"
    return candidates[-1], [*too_large, f"strategy {candidates[-1]}: the smallest, but it does not fit; {hint}"]


def _candidates(answers: Answers) -> Iterator[str]:
    if answers.framework == "deepspeed":
        yield from ("deepspeed-zero3",) if answers.wish == "memory" else ("deepspeed-zero2", "deepspeed-zero3")
        return
    if answers.gpus == 1:
        yield "single"
    elif answers.wish == "memory":
        yield "fsdp2"
    else:
        yield from ("ddp", "fsdp2")


def _fitted(answers: Answers, name: str, strategy: str) -> int:
    """Return the estimated bytes per GPU of a step with one row."""
    assert answers.model is not None
    length = min(2048, most_positions(answers.model) or 2048)
    gpu = answers.gpu or "h100"
    policy = recipe(name).decided()
    return estimate(Request(answers.model, policy, strategy, answers.gpus, length=length, gpu=gpu)).needed
