"""The kinds of events: each has a finder, and a kind that does not exist is an error of the type checker."""

from __future__ import annotations

from typing import get_args

import pytest

from mpguard.lint.facts.behaviour.events import FINDERS, Event, EventKind
from mpguard.lint.facts.file import Facts
from mpguard.lint.source.source import Source

#: One statement for each kind of event, after the imports.
CODE = {
    "accelerator": "accelerate.Accelerator()",
    "arguments": "transformers.TrainingArguments('out')",
    "autocast": "torch.autocast('cuda')",
    "backward": "loss.backward()",
    "cast": "x.half()",
    "clip": "torch.nn.utils.clip_grad_norm_(parameters, 1.0)",
    "compile": "model = torch.compile(model)",
    "construct": "torch.nn.Linear(8, 8, dtype=torch.float16)",
    "convert": "torchao.float8.convert_to_float8_training(model)",
    "convert_accelerate": "accelerate.utils.convert_model_to_fp8_ao(model)",
    "default_dtype": "torch.set_default_dtype(torch.float16)",
    "float8_config": "torchao.float8.Float8LinearConfig()",
    "fp8_handler": "accelerate.utils.AORecipeKwargs()",
    "fp8_recipe": "transformer_engine.common.recipe.DelayedScaling()",
    "framework": "accelerator.backward(loss)",
    "get_scale": "scaler.get_scale()",
    "initialize": "deepspeed.initialize(model=model)",
    "load": "transformers.AutoModel.from_pretrained('gpt2')",
    "policy": "torch.distributed.fsdp.MixedPrecision()",
    "prepare": "accelerator.prepare(model)",
    "restore": "optimizer.load_state_dict(state)",
    "scale": "scaler.scale(loss)",
    "scaler": "torch.amp.GradScaler()",
    "scaler_step": "scaler.step(optimizer)",
    "shard": "torch.distributed.fsdp.fully_shard(model)",
    "state": "optimizer.state_dict()",
    "step": "optimizer.step()",
    "trainer": "transformers.Trainer(model)",
    "unscale": "scaler.unscale_(optimizer)",
    "update": "scaler.update()",
}
IMPORTS = """\
import accelerate, deepspeed, torch, torch.distributed.fsdp, torchao.float8, transformers
import transformer_engine.common.recipe
"""


def test_the_kinds_are_those_that_have_a_finder() -> None:
    assert set(get_args(EventKind)) == FINDERS.keys()


@pytest.mark.parametrize("kind", get_args(EventKind))
def test_each_kind_is_found(kind: EventKind) -> None:
    assert kind in CODE, f"a new kind of event: add a statement to CODE in which `{kind}` is found"
    facts = Facts(Source.parse((IMPORTS + CODE[kind] + "\n").encode(), "example.py"))
    events = facts.events(kind)
    assert [type(event) for event in events] == [Event], kind
    assert events[0].kind == kind
