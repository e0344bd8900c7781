"""Estimate the memory of a training run on each GPU, from a model's config.json, a recipe and a strategy.

    reading      config.json, or a built-in model (models.json) -> `ModelConfig`
    tape         the operators of a training step, each with what it saves for the backward pass
    layers       parts that families share: norms, rotary embeddings, activations
    blocks       parts with several layers
    decoders     LLaMA and its relatives, with and without experts: one style per family
    encoders     BERT and its relatives
    seq2seq      BART and its relatives, and Whisper
    vision       vision transformers, alone, with an encoder of text, or in front of a decoder
    others       GPT-2, GPT-NeoX, OPT, DistilBERT, T5
    families     all of these, by `model_type`
    recording    the tape of any model of torch, from its forward pass on the meta device
    transformers_models  architectures that are none of the families, as transformers builds them
    compiled     what torch.compile saves instead
    replay       runs a tape forward and backward, and records what is alive
    adapters     LoRA on a frozen model, which may be quantized
    optimizers   what an optimizer keeps for each parameter
    strategies   what DDP, FSDP and ZeRO keep on one GPU
    gpus         the memory of GPUs
    estimate     `Request` -> `MemoryEstimate`, the largest batch, what fits where

Needs no torch for the families. tests/estimate compares with transformers, torch's optimizers, FSDP2 and DeepSpeed.
"""

from __future__ import annotations

from mpguard.estimate.adapters import Adapters
from mpguard.estimate.estimate import PARTS, MemoryEstimate, Request, estimate, fitting, largest_batch, what_fits
from mpguard.estimate.families import FAMILIES, most_positions
from mpguard.estimate.gpus import MEMORY_MIB
from mpguard.estimate.optimizers import OPTIMIZERS
from mpguard.estimate.reading import ModelConfig, built_in, read_model

__all__ = [
    "FAMILIES", "MEMORY_MIB", "OPTIMIZERS", "PARTS", "Adapters", "MemoryEstimate", "ModelConfig", "Request", "built_in",
    "estimate", "fitting", "largest_batch", "most_positions", "read_model", "what_fits",
]  # fmt: skip
