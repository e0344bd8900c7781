"""Who calls a collective, from the stack; whole programs: test_reductions.py."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")

from mpguard.runtime.proof import collectives


def test_the_forward_of_a_function_is_known_by_its_code() -> None:
    """Since torch 2.14 `Function.apply` has no frame of Python."""
    found: list[str] = []

    class Plain(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_context: Any, inputs: Any) -> Any:
            found.append(collectives.origin())
            return inputs.view_as(inputs)

    class Wrapped(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(_context: Any, inputs: Any) -> Any:
            found.append(collectives.origin())
            return inputs.view_as(inputs)

    def forward(inputs: Any) -> Any:
        found.append(collectives.origin())
        return inputs

    for call in (Plain.apply, Wrapped.apply, forward):
        call(torch.ones(2, requires_grad=True))
    assert found == ["function", "function", "script"]
