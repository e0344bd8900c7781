"""Models of transformers that no program here describes: built without memory, and run on the meta device.

Imports torch and transformers, so it is imported for such a model only. No code of the model's repository runs.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mpguard.core.errors import ConfigError
from mpguard.estimate.blocks import Batch
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.recording import recorded
from mpguard.estimate.tape import Tape, TapeDtypes

#: The classes that train a model, in the order in which they are tried where the config.json names none.
_HEADS = (
    "CausalLM", "Seq2SeqLM", "ImageTextToText", "MaskedLM", "SpeechSeq2Seq", "CTC", "ImageClassification",
    "AudioClassification", "SemanticSegmentation", "ObjectDetection", "DepthEstimation", "MaskGeneration",
    "VideoClassification", "TextToWaveform", "TimeSeriesPrediction", "KeypointDetection", "PreTraining",
)  # fmt: skip
#: Tokens of a batch: no special tokens of any model.
_TOKEN = 5


def record_unknown(config: ModelConfig, batch: Batch, precision: TapeDtypes, compiled: bool = False) -> Tape:
    """Return the tape of a model that transformers builds and runs. Raises `ConfigError` if it does not."""
    model = _model(json.dumps(config.values, sort_keys=True), config.path)
    first: Exception | None = None
    for inputs in _batches(model, batch):
        try:
            return recorded(model, inputs, precision, compiled)
        except ConfigError:
            raise
        except Exception as error:  # the code of any model
            first = first or error
    reason = "none of the usual inputs (text, images, sound) is among its arguments" if first is None else _short(first)
    raise ConfigError(
        f"{config.path}: transformers {transformers.__version__} builds `{config.architecture}`, but its forward pass "
        f"does not run on the meta device: {reason}"
    )


@lru_cache(maxsize=2)
def _model(values: str, path: str) -> nn.Module:
    """Return the model of a config.json, in training mode, on the meta device."""
    known = json.loads(values, object_hook=_number)
    kind = known["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{path}: the architecture `{kind}` is known neither here (`mpguard estimate --list`) nor to transformers "
            f"{transformers.__version__}. For one of the same shape (llama for most decoders), set `model_type` in a "
            "copy of its config.json"
        )
    transformers.logging.set_verbosity_error()
    try:
        config = CONFIG_MAPPING[kind].from_dict(known)
        for part in _parts(config):
            _train_whole(part)
        with torch.device("meta"):
            model: nn.Module = _build(config, known.get("architectures") or ())
    except Exception as error:  # the code of any model
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} does not build `{kind}` from it: {_short(error)}"
        ) from error
    return model.train()


def _number(found: dict[str, Any]) -> Any:
    """Return the float that transformers has written as `{"__float__": "Infinity"}`; other objects as they are."""
    return float(found["__float__"]) if list(found) == ["__float__"] else found


def _parts(config: Any) -> Iterator[Any]:
    """Yield a config and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if isinstance(part, transformers.PretrainedConfig):
            yield from _parts(part)


def _train_whole(config: Any) -> None:
    """Switch off what depends on chance, and what training does not use."""
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    if getattr(config, "use_cache", None):
        config.use_cache = False


def _build(config: Any, architectures: Sequence[str]) -> Any:
    """Build the class that a config.json names; else the first one that trains such a model."""
    for name in architectures:
        known = getattr(transformers, name, None)
        if known is not None and hasattr(known, "_from_config"):
            return known._from_config(config)
    for head in _HEADS:
        found = getattr(modeling_auto, f"AutoModelFor{head}", None)
        if found is not None and type(config) in found._model_mapping:
            return found.from_config(config)
    return transformers.AutoModel.from_config(config)


def _batches(model: Any, batch: Batch) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield batches that a model may take, the usual one first."""
    names = inspect.signature(model.forward).parameters
    text = _text(model, batch, names)
    if text:
        yield text
    for other in _other(model.config, batch, names):
        if text:
            yield {**text, **other}
        yield other
        if "decoder_input_ids" in names and "decoder_input_ids" not in text:
            yield {**other, "decoder_input_ids": _ids(model.config, batch)}


def _text(model: Any, batch: Batch, names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if "input_ids" not in names:
        return {}
    ids = _ids(model.config, batch)
    found = {"input_ids": ids}
    if "labels" in names and _scores_words(model):
        found["labels"] = ids.clone()
    elif "decoder_input_ids" in names:
        found["decoder_input_ids"] = ids.clone()
    return found


def _scores_words(model: Any) -> bool:
    """True if a model's labels are its tokens."""
    finder = getattr(model, "get_output_embeddings", None)
    return finder is not None and finder() is not None


def _ids(config: Any, batch: Batch) -> torch.Tensor:
    """Return token ids; the last one of a row ends it."""
    ids = torch.full((batch.size, batch.length), _TOKEN)
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and end >= 0:
        ids[:, -1] = end
    return ids


def _other(config: Any, batch: Batch, names: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs that are no text: images, sound by frames in both layouts, waves."""
    if "pixel_values" in names:
        sizes, channels = _first(config, "image_size", 224), _first(config, "num_channels", 3)
        sizes = sizes if isinstance(sizes, (list, tuple)) else (sizes, sizes)
        if "num_frames" in config:
            yield {"pixel_values": _numbers(batch.size, config.num_frames, channels, *sizes)}
        yield {"pixel_values": _numbers(batch.size, channels, *sizes)}
    if "input_features" in names:
        rows = next((size for size in (_first(config, key, 0) for key in
                    ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim"))
                    if size), 80)  # fmt: skip
        frames = 2 * (_first(config, "max_source_positions", 0) or batch.length)
        yield {"input_features": _numbers(batch.size, rows, frames)}
        yield {"input_features": _numbers(batch.size, batch.length, rows)}
    for name in ("input_values", "input_audio"):
        if name in names:
            if rows := _first(config, "num_mel_bins", 0):
                yield {name: _numbers(batch.size, _first(config, "max_length", 1024), rows)}
            yield {name: _numbers(batch.size, 320 * batch.length)}
            yield {name: _numbers(batch.size, 1, 320 * batch.length)}


def _first(config: Any, name: str, default: Any) -> Any:
    return next((value for part in _parts(config) if (value := getattr(part, name, None)) is not None), default)


def _numbers(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="meta")


def _short(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"
