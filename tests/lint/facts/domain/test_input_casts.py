"""The casts of tensors by which a training program loses nothing."""

from __future__ import annotations

import textwrap

import pytest

from mpguard.lint.facts.domain import input_casts
from mpguard.lint.facts.file import Facts
from mpguard.lint.source.source import Source
from mpguard.policy.dtype import Dtype

PROGRAM = """
import torch
from torch.nn.functional import mse_loss

model = torch.nn.Linear(8, 8)
teacher = build_teacher().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
{body}
    loss.backward()
    optimizer.step()
"""


def loses_nothing(body: str) -> bool:
    text = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    facts = Facts(Source.parse(text.encode(), "example.py"))
    (cast,) = facts.events("cast")
    guards = cast.may_be(Dtype.FP16)
    training = facts.training_use.cast(cast, Dtype.FP16, guards)
    assert training is not None
    return input_casts.loses_nothing(cast, Dtype.FP16, guards, training)


REGION = "with torch.autocast('cuda', dtype=torch.float16):\n    loss = model({given}).mean()"


@pytest.mark.parametrize(
    "body",
    [
        "low = torch.float16 if args.fp16 else torch.float32\nx = x.to(low)\n" + REGION.format(given="x"),
        "low = torch.float16 if args.fp16 else torch.float32\n" + REGION.format(given="x.to(low)"),
        "if args.fp16:\n    x, y = resize(x.half(), y)\n" + REGION.format(given="x, y"),
        "loss = (model(x) - teacher(x.half()).float()).abs().mean()",
        "loss = mse_loss(model(torch.cat([y.sin(), y.cos()]).half()), x)",
        "kept = x.half()\nloss = model(kept.float()).mean()",
        "if args.fp16:\n    x = x.half()\nloss = model(x).mean()",
    ],
)
def test_nothing_is_lost(body: str) -> None:
    assert loses_nothing(body)


@pytest.mark.parametrize(
    "body",
    [
        "x = x.half()\nloss = model(x).mean()",
        "x = x.half()\n" + REGION.format(given="x"),
        REGION.format(given="x.to(torch.float16)"),
        "x = x.half()\n" + REGION.format(given="x").replace("float16", "bfloat16"),
        "boxes = x.half()\n" + REGION.format(given="boxes"),
        REGION.format(given="x, positions=y.half()"),
        "x = x.half()\n" + REGION.format(given="x") + " + x.mean()",
        "if args.shuffle:\n    x = x.half()\nloss = model(x).mean()",
        "x = x.half() if args.fp16 else x\n" + REGION.format(given="x").replace("float16", "bfloat16"),
        "loss = model(teacher.embed(x).half()).mean()",
    ],
)
def test_something_is_lost(body: str) -> None:
    assert not loses_nothing(body)
