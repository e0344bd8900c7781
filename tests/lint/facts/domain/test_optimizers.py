"""Optimizers, and the weights that they train."""

from __future__ import annotations

from lint_facts import facts_of

from mpguard.policy.dtype import Dtype

LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""


def test_an_optimizer_that_rounds_stochastically_is_not_plain() -> None:
    code = "from torchao.optim import AdamW8bit\nmodel.bfloat16()" + LOOP.replace(
        "torch.optim.AdamW(model.parameters())", "AdamW8bit(model.parameters(), bf16_stochastic_round=True)"
    )
    facts = facts_of(f"import torch\n{code}")
    (weights,) = facts.training_use.weights(Dtype.BF16)
    assert len(weights.training.of("optimizer")) == 1
    assert facts.optimizers.plain(weights.training) == []
