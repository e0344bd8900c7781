"""Words in names that say what something is for: one entry for each role that several facts and rules ask about.

A pattern is searched in a name. A string is the words of a role, for the patterns that add words of their own to it.
`tests/lint/facts/program/test_roles.py` has names of each role, and names that look like it.
"""

from __future__ import annotations

from mpguard.core.lazy_pattern import lazy_pattern

#: An optimizer, or a function that makes one.
OPTIMIZER = lazy_pattern("(?i)optim")
#: A criterion: `loss_fn`, `criterion`.
LOSSES = r"loss|loss_?fn|loss_?func(?:tion)?|criterion"
#: A flag or a function that asks for an overflow.
OVERFLOWS = r"finite|inf(?![a-z])|nan(?![a-z])|overflow"
#: The dict of a model's weights, or the file that it is in.
CHECKPOINTS = lazy_pattern(r"(?i)state_?dict|ckpt|checkpoint|(?:^|_)sd$")
#: A function that saves.
SAVES = lazy_pattern(r"(?:^|_)save(?:_|d?$)|^save[A-Z]")
#: A function that saves or restores, or an object that has the state of another one.
STORES = lazy_pattern(r"(?i)save|checkpoint|ckpt|snapshot|store|dump|resume|state")
#: A function that keeps a result of a training: its weights, its quality.
KEEPS_RESULT = lazy_pattern(r"(?i)save|dump|state_dict|push|eval|valid|test|accura|predict|generate|metric|infer|score")
#: A function or a class that gives data.
GIVES_DATA = lazy_pattern(
    r"(?i)loader|dataset|batch(?:es)?$|^(?:next|iter|open|loadtxt|read_\w+|imread|memmap|sample)$"
)
#: A number that is reported, and may be a loss.
MEASURED = lazy_pattern("(?i)loss|criterion|metric|kl_div|cross_entropy")
#: A function that prints or logs what it gets.
PRINTS = r"print|log|info|debug|warn|write"
#: A function that stores, restores, prints or tests what it gets, and does not train with it.
HANDLES_STATE = rf"save|load|checkpoint|ckpt|restore|resume|{PRINTS}|isinstance|hasattr|bool"
#: A flag that selects the last micro-batch of gradient accumulation: `(i + 1) % n == 0`, `is_accumulating`.
ACCUMULATES = lazy_pattern(
    r"(?i)%|accum|last_(?:opt_)?step|update_freq|sync_grad|should_(?:step|update)|do_(?:step|update)"
)

#: Words in the name of a function that trains; that does not; that also runs steps, to test or to measure.
_TRAINS = frozenset({"train", "training", "trainer", "fit", "finetune", "pretrain", "optimize", "learn"})
_INFERS = frozenset({
    "eval", "evaluate", "evaluation", "evaluator", "valid", "validate", "validation", "val", "test", "predict",
    "prediction", "predictor", "generate", "generation", "generator", "infer", "inference", "sample", "sampling",
    "export", "onnx", "convert", "conversion", "demo", "benchmark", "bench", "visualize", "pipeline", "score", "embed",
    "embedding", "encode", "decode", "profile", "profiler",
})  # fmt: skip
_MEASURES = frozenset({"test", "benchmark", "bench", "profile", "profiler"})
_WORDS = lazy_pattern(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def evaluates(name: str) -> bool:
    """True if a function of this name is used for inference: `evaluate`, `validation_step`, `test_*`, `export_onnx`."""
    words = _words(name)
    return name.startswith("test_") or (bool(words & _INFERS) and not words & _TRAINS)


def measures(name: str) -> bool:
    """True if a function of this name tests or measures: its steps train nothing that is used."""
    return not _MEASURES.isdisjoint(_words(name))


def trains(name: str) -> bool:
    """True if a function of this name trains: `train`, `fit`, `train_one_epoch`."""
    return not _TRAINS.isdisjoint(_words(name))


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}
