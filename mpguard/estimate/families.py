"""The model families, by `model_type`: each is the program that runs one, which declares its weights."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping

from mpguard.core.errors import ConfigError
from mpguard.estimate import decoders, encoders, others, seq2seq, vision
from mpguard.estimate.blocks import Batch
from mpguard.estimate.compiled import fuse
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import Tape, TapeDtypes

Program = Callable[[Tape, ModelConfig, Batch], object]

FAMILIES: Mapping[str, Program] = {
    **dict.fromkeys(decoders.STYLES, decoders.run),
    **dict.fromkeys(encoders.STYLES, encoders.run),
    **dict.fromkeys(seq2seq.STYLES, seq2seq.run),
    **vision.PROGRAMS,
    **others.PROGRAMS,
}


#: Families with a table of positions, in which longer rows have no entry: the key, its default, and entries that are
#: no positions.
_TABLES = {
    "gpt2": ("n_positions", 1024, 0), "opt": ("max_position_embeddings", 2048, 0),
    "bert": ("max_position_embeddings", 512, 0), "roberta": ("max_position_embeddings", 512, 2),
    "xlm-roberta": ("max_position_embeddings", 512, 2), "distilbert": ("max_position_embeddings", 512, 0),
    **dict.fromkeys(("electra", "deberta-v2"), ("max_position_embeddings", 512, 0)),
    **dict.fromkeys(("camembert", "mpnet"), ("max_position_embeddings", 512, 2)),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian"), ("max_position_embeddings", 1024, 0)),
    "whisper": ("max_target_positions", 448, 0),
    **dict.fromkeys(("clip", "siglip"), ("max_position_embeddings", 64, 0)),
}  # fmt: skip


def most_positions(config: ModelConfig) -> int | None:
    """Return the longest row that a model takes; None if its architecture sets no limit."""
    if config.architecture not in FAMILIES:
        return _stated_positions(config)
    table = _TABLES.get(config.architecture)
    if config.architecture in ("clip", "siglip"):
        config = config.section("text_config", f"{config.architecture}_text_model")
    return None if table is None else config.size(table[0], default=table[1]) - table[2]


def _stated_positions(config: ModelConfig) -> int | None:
    """Return how many positions a config.json of another architecture states, whatever they are."""
    parts = (config.values, config.part("text_config"))
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "seq_length")
    found = [part[name] for part in parts for name in names if isinstance(part.get(name), int) and part[name] > 2]
    return min(found, default=None)


def _with_transformers(config: ModelConfig, batch: Batch, precision: TapeDtypes, compiled: bool) -> Tape:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"{config.path}: the architecture `{config.architecture}` is not one of {', '.join(sorted(FAMILIES))}. "
            "Others are estimated with transformers and torch, which are not installed here (pip install transformers "
            "torch). For a model of the same shape (llama for most decoders), set `model_type` in a copy of its "
            "config.json"
        )
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the libraries log while they are imported, and about defaults
    try:
        from mpguard.estimate.transformers_models import record_unknown

        return record_unknown(config, batch, precision, compiled)
    finally:
        logging.disable(disabled)


def record(config: ModelConfig, batch: Batch, precision: TapeDtypes | None = None, compiled: bool = False) -> Tape:
    """Run a model on a tape; one that no program here describes with transformers, on the meta device.

    Raises `ConfigError` for an architecture that neither knows.
    """
    program = FAMILIES.get(config.architecture)
    if program is None:
        tape = _with_transformers(config, batch, precision or TapeDtypes(), compiled)
        return fuse(tape) if compiled else tape
    most = most_positions(config)
    if most is not None and batch.length > most:
        raise ConfigError(
            f"{config.path}: rows of {batch.length} tokens, but the model has {most} positions. Lower --seq"
        )
    tape = Tape(precision or TapeDtypes(), compiled)
    program(tape, config, batch)
    return fuse(tape) if compiled else tape
