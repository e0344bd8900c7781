"""The number formats, compared with torch's."""

from __future__ import annotations

import pytest

from mpguard.policy.dtype import Dtype

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16, Dtype.FP32])
@pytest.mark.parametrize("number", [0, 1, -0.1, 0.25, 90, 257, 2049, -2050, 65504, 65505, 1e6, 3 * 2.0**20, 1e-8])
def test_holds(dtype: Dtype, number: float) -> None:
    stored = torch.tensor(number, dtype=torch.float64).to(dtype.torch).item()
    assert dtype.holds(number) == (stored == number)
