"""The number formats. This module does not import torch."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

from mpguard.core.errors import PolicyError, did_you_mean

if TYPE_CHECKING:
    from torch import dtype as TorchDtype


class Dtype(Enum):
    """A number format. The only dtype table of mpguard.

    torch_name: the attribute of `torch`, such as `bfloat16`.
    short: the name in tables and configs, such as `bf16`.
    bits: width of one element.
    aliases: other spellings. `Dtype.parse` accepts all of them, with or without `torch.`.
    mantissa: the number of bits that store the mantissa.
    largest: the largest finite number.
    """

    FP64 = ("float64", "fp64", 64, ("double",), (52, 1.7976931348623157e308))
    FP32 = ("float32", "fp32", 32, ("float", "no", "32"), (23, 3.4028234663852886e38))
    FP16 = ("float16", "fp16", 16, ("half", "16"), (10, 65504.0))
    BF16 = ("bfloat16", "bf16", 16, ("bfloat_16",), (7, 3.3895313892515355e38))
    FP8_E4M3 = ("float8_e4m3fn", "e4m3", 8, ("float8_e4m3", "float8_e4m3fnuz"), (3, 448.0))
    FP8_E5M2 = ("float8_e5m2", "e5m2", 8, ("float8_e5m2fnuz",), (2, 57344.0))
    FP4_E2M1 = ("float4_e2m1fn_x2", "e2m1", 4, ("float4_e2m1",), (1, 6.0))

    def __init__(
        self, torch_name: str, short: str, bits: int, aliases: tuple[str, ...], limits: tuple[int, float]
    ) -> None:
        self.torch_name = torch_name
        self.short = short
        self.bits = bits
        self.aliases = aliases
        self.mantissa, self.largest = limits

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger number, as `torch.finfo(dtype).eps`."""
        return 2.0**-self.mantissa

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal number, as `torch.finfo(dtype).smallest_normal`."""
        exponent = self.bits - 1 - self.mantissa
        return float(2.0 ** (2 - 2 ** (exponent - 1)))

    @property
    def largest_exact_integer(self) -> int:
        """The integer up to which all integers are represented exactly: 2048 for FP16, 256 for BF16."""
        return 1 << (self.mantissa + 1)

    def holds(self, number: float) -> bool:
        """True if the format represents a number exactly; subnormal numbers do not count."""
        if number == 0:
            return True
        scaled = math.frexp(number)[0] * self.largest_exact_integer
        return scaled == int(scaled) and self.smallest_normal <= abs(number) <= self.largest

    @property
    def label(self) -> str:
        """The name in messages: `BF16`, `FP8 E4M3`."""
        return self.name.replace("_", " ")

    @property
    def torch(self) -> TorchDtype:
        """The `torch.dtype`; imports torch."""
        import torch

        dtype: TorchDtype = getattr(torch, self.torch_name)
        return dtype

    @classmethod
    def parse(cls, text: str) -> Dtype:
        """Return the dtype of any spelling: `bf16`, `bfloat16`, `torch.bfloat16`, `half`.

        Raises `PolicyError` for an unknown spelling, with the similar ones.
        """
        found = cls.spelled(text)
        if found is None:
            raise PolicyError(f"`{text}` is not a dtype{did_you_mean(text, _SPELLINGS)}")
        return found

    @classmethod
    def spelled(cls, text: str) -> Dtype | None:
        """Return the dtype of any spelling like `parse`, but None for an unknown one."""
        return _SPELLINGS.get(text.removeprefix("torch.").lower())

    @classmethod
    def of(cls, dtype: TorchDtype) -> Dtype | None:
        """Return the member for a `torch.dtype`; None for integers and formats that are not listed."""
        return cls.spelled(str(dtype))

    def __str__(self) -> str:
        return self.short

    def __repr__(self) -> str:
        return f"Dtype.{self.name}"


_SPELLINGS = {spelling: dtype for dtype in Dtype for spelling in (dtype.torch_name, dtype.short, *dtype.aliases)}
HALF_DTYPES = tuple(dtype for dtype in Dtype if dtype.bits == 16)
"""The 16-bit formats: FP16 and BF16."""
