"""FP32 master weights that may be kept."""

from __future__ import annotations

import pytest
from lint_facts import facts_of

from mpguard.policy.dtype import Dtype

LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""


def keeps_masters(code: str) -> bool:
    facts = facts_of(f"import torch\n{code}")
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
