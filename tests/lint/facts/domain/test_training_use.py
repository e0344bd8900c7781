"""The weights that a file trains, their dtype and what trains them; the contents of its checkpoints."""

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
        "model = get_peft_model(model, config)\nmodel.half()",
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


def keeps_masters(code: str) -> bool:
    facts = facts_of(code)
    (weights,) = facts.training_use.weights(Dtype.BF16)
    return facts.master_weights.kept_for(weights)


@pytest.mark.parametrize(
    "use",
    [
        "import deepspeed\nmodel.bfloat16()" + LOOP + "engine = deepspeed.initialize(model=model)",
        "from torch.distributed.fsdp import FullyShardedDataParallel as Wrap\nmodel.bfloat16()\nWrap(other)" + LOOP,
        "o = FP16_Optimizer(o)\nmodel.bfloat16()" + LOOP,
    ],
)
def test_master_weights_may_be_kept_by_other_code(use: str) -> None:
    assert keeps_masters(use)


@pytest.mark.parametrize(
    "unrelated",
    [
        "",
        "import deepspeed\nfrom torch.distributed.fsdp import FSDP\n",
        "from torch.distributed.fsdp import FSDP\ndef other(model):\n    return FSDP(model)\n",
    ],
)
def test_master_weights_are_not_kept_by_what_does_not_concern_the_model(unrelated: str) -> None:
    assert not keeps_masters(unrelated + "model.bfloat16()" + LOOP)


def test_an_optimizer_that_rounds_stochastically_is_not_plain() -> None:
    code = "from torchao.optim import AdamW8bit\nmodel.bfloat16()" + LOOP.replace(
        "torch.optim.AdamW(model.parameters())", "AdamW8bit(model.parameters(), bf16_stochastic_round=True)"
    )
    facts = facts_of(code)
    (weights,) = facts.training_use.weights(Dtype.BF16)
    assert len(weights.training.of("optimizer")) == 1
    assert facts.optimizers.plain(weights.training) == []


def test_the_roles_of_states() -> None:
    facts = facts_of(
        """
        from torch.amp import GradScaler
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, f)
        scaler = GradScaler()
        state = {"m": model.state_dict(), "o": optimizer.state_dict(), "g": scaler.state_dict()}
        state["s"] = schedule.state_dict()
        torch.save(state, "last.pt")
        before = optimizer.state_dict()
        for each in objects:
            torch.save(each.state_dict(), "x.pt")
        """
    )
    checkpoints = facts.checkpoints
    assert [checkpoints.role(event) for event in facts.events("state")] == [
        "model", "optimizer", "scaler", "other", "optimizer", "",
    ]  # fmt: skip
    (saved,) = checkpoints.saved("optimizer")
    assert [call.name for call in checkpoints.writes(saved)] == ["save"]
    assert checkpoints.unclear("state")
    assert not checkpoints.unclear("restore")
