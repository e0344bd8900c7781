"""The weights that a file trains, their dtype and what trains them."""

from __future__ import annotations

import textwrap

import pytest

from mpguard.lint.facts.file import Facts
from mpguard.lint.source.source import Source
from mpguard.policy.dtype import Dtype

LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""


def facts_of(code: str) -> Facts:
    return Facts(Source.parse(("import torch\n" + textwrap.dedent(code)).encode(), "example.py"))


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("model = torch.nn.Linear(8, 8).bfloat16()", "bfloat16"),
        ("model.to(torch.bfloat16)", "bfloat16"),
        ("model = AutoModel.from_pretrained('x', dtype='bfloat16')", "bfloat16"),
        ("model = AutoModel.from_pretrained('x', torch_dtype=torch.half).cuda()", "float16"),
        ("model = torch.nn.Linear(8, 8, dtype=torch.float16)", "float16"),
        ("for m in model.modules():\n    m.half()", "float16"),
        ("for p in model.parameters():\n    p.data = p.data.half()", "float16"),
        ("def low(m):\n    m.half()\nmodel.apply(low)", "float16"),
        ("model = torch.nn.Linear(8, 8).half()\nif later:\n    model = model.quantize(4)", "float16"),
        ("model.apply(lambda m: m.half())", "float16"),
        ("from peft import get_peft_model\nmodel = get_peft_model(model, config)\nmodel.half()", "float16"),
    ],
)
def test_low_precision_weights_are_found_with_their_optimizer(code: str, dtype: str) -> None:
    facts = facts_of("from transformers import AutoModel\n" + code + LOOP)
    (weights,) = facts.training_use.weights(dtype)
    assert weights.dtype is Dtype.parse(dtype)
    (optimizer,) = facts.optimizers.plain(weights.training)
    assert facts.called_path(optimizer) == "torch.optim.AdamW"


@pytest.mark.parametrize(
    "code",
    [
        "model = torch.nn.Linear(8, 8).half().float()",
        "model = torch.nn.Linear(8, 8)\nmodel.half()\nmodel.float()",
        "model.half()\nmodel.requires_grad_(False)",
        "model = get_peft_model(model.half(), config)",
        "model = AutoModel.from_pretrained('x', dtype=torch.float16, load_in_4bit=True)",
        "model = AutoModel.from_pretrained('x', dtype=torch.float16, **arguments)",
        "model = Net().half()\nmodel = model.quantize(bits=4)",
        "model = Net().half().quantize(4)",
        "model = torch.nn.Linear(8, 8).half()\nfor p in model.parameters():\n    p.data = p.data.float()",
        "for p in model.parameters():\n    if not p.requires_grad:\n        p.data = p.data.half()",
        "x = torch.randn(8).half()",
        "other = torch.nn.Linear(8, 8).half()",
    ],
)
def test_weights_that_are_not_trained_in_low_precision(code: str) -> None:
    facts = facts_of("from peft import get_peft_model\nfrom transformers import AutoModel\n" + code + LOOP)
    assert facts.training_use.weights(Dtype.FP16) == []
