"""How models, and what their optimizers update, are named in messages."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

from mpguard.runtime.proof.models import model_names
from mpguard.runtime.proof.optimizer_state import name_first, partition_names


def test_models_of_one_class_have_the_variable_of_the_script_or_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, head = nn.Sequential(), nn.Sequential(), nn.Linear(1, 1)
    assert model_names([query, key, head]) == ["Sequential 1", "Sequential 2", "Linear"]
    monkeypatch.setattr(sys.modules["__main__"], "query", query, raising=False)
    assert model_names([query, key]) == ["Sequential `query`", "Sequential 2"]


def test_the_first_parameter_names_an_optimizer() -> None:
    model = nn.Linear(16, 32)
    names = {id(own): name for name, own in model.named_parameters()}
    assert name_first(list(model.parameters()), names, [model]) == "`weight` [32 x 16] and 1 more of Linear"
    assert name_first([torch.zeros(2)], names, [model]) == "", "masters, or parts of an engine"


def test_flat_partitions_of_zero_are_named_by_their_parameters() -> None:
    """The names of DeepSpeed's attributes; a whole run is in test_step."""
    model, flat = nn.Linear(16, 32), torch.zeros(544)
    optimizer = SimpleNamespace(fp32_partitioned_groups_flat=[flat], fp16_groups=[list(model.parameters())])
    names = {id(own): f"`{name}`" for name, own in model.named_parameters()}
    assert partition_names(optimizer, names) == {id(flat): "FP32 partition 0 of `weight` and 1 more"}
    assert partition_names(SimpleNamespace(), names) == {}
