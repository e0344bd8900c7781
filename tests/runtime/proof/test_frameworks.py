"""Advice about the framework that a script uses, and what it was given."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("accelerate", reason="the real library runs here")

import mpguard
from mpguard.runtime.proof.frameworks import precision_advice


@pytest.mark.parametrize("frozen", [False, True], ids=["tracked", "frozen"])
def test_a_framework_is_found_also_where_the_script_has_frozen_its_objects(frozen: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    try:
        if frozen:
            gc.freeze()
        found = precision_advice(mpguard.recipe("bf16_mixed"))
    finally:
        del accelerator
        AcceleratorState._reset_state(reset_partial_state=True)
    assert found == 'Accelerator was not given bf16: write Accelerator(mixed_precision="bf16")'
