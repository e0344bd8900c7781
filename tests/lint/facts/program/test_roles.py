"""Roles: names that have one, and names that look like it."""

from __future__ import annotations

import re

import pytest

from mpguard.lint.facts.program import roles

NAMES = {
    "OPTIMIZER": (("optimizer_g", "self.optim", "FP16Optimizer"), ("options", "opt")),
    "LOSSES": (("loss", "loss_fn", "lossfunc", "criterion"), ("lost", "criteria")),
    "OVERFLOWS": (("isfinite", "found_inf", "is_nan", "overflowed"), ("info", "name", "inference")),
    "HANDLES_STATE": (("save_checkpoint", "log_scale", "isinstance"), ("train_step", "backward")),
}


def test_each_role_has_names() -> None:
    assert NAMES.keys() == {name for name in vars(roles) if name.isupper()}


@pytest.mark.parametrize("role", NAMES)
def test_a_role_is_told_by_the_name(role: str) -> None:
    of_role, others = NAMES[role]
    pattern = getattr(roles, role)
    search = re.compile(pattern).search if isinstance(pattern, str) else pattern.search
    assert all(search(name) for name in of_role)
    assert not any(search(name) for name in others)
