"""How code writes a low dtype: for the triggers of rules that ask `precision`."""


def _spelled(*dtypes: bytes) -> tuple[bytes, ...]:
    """How code writes a dtype where it gives one, as against asking for it (`x.dtype in (torch.float16, ...)`)."""
    ways = (b"dtype=", b" = ", b"else ", b"return ", b"(", b".to(", b".type(", b", ")
    ends = {b"(": b")", b", ": b")"}
    return tuple(way + b"torch." + dtype + ends.get(way, b"") for way in ways for dtype in dtypes)


#: For triggers: without one of these nothing in a file is cast to FP16, or to a low dtype.
CASTS_FP16 = (*_spelled(b"float16", b"half"), b".half()", b"HalfTensor", b"import torch as", b"import float16",
              b"import half")  # fmt: skip
CASTS_LOW = (*CASTS_FP16, *_spelled(b"bfloat16"), b".bfloat16()", b"BFloat16Tensor", b"import bfloat16")
#: The same, with what may lower a matrix product.
_LOWERS = (
    b".autocast(", b" autocast(", b"@autocast", b"import autocast", b"autocast as", b"amp.autocast", b"Accelerator(",
)  # fmt: skip
SPEAKS_FP16 = (*CASTS_FP16, *_LOWERS)
SPEAKS_LOW = (*CASTS_LOW, *_LOWERS)
