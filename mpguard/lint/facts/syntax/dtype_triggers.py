"""Triggers for rules that need `facts.precision`: the byte strings by which code produces a low-precision tensor."""


def _spelled(*dtypes: bytes) -> tuple[bytes, ...]:
    """Return the ways in which code uses a dtype to create or cast a tensor; not those that test one
    (`x.dtype in (torch.float16, ...)`).
    """
    ways = (b"dtype=", b" = ", b"else ", b"return ", b"(", b".to(", b".type(", b", ")
    ends = {b"(": b")", b", ": b")"}
    return tuple(way + b"torch." + dtype + ends.get(way, b"") for way in ways for dtype in dtypes)


#: A file that contains none of these casts nothing to FP16, or to a low-precision dtype.
CASTS_FP16 = (*_spelled(b"float16", b"half"), b".half()", b"HalfTensor", b"import torch as", b"import float16",
              b"import half")  # fmt: skip
CASTS_LOW = (*CASTS_FP16, *_spelled(b"bfloat16"), b".bfloat16()", b"BFloat16Tensor", b"import bfloat16")
#: The same together with what may run a matrix product in low precision.
_LOWERS = (
    b".autocast(", b" autocast(", b"@autocast", b"import autocast", b"autocast as", b"amp.autocast", b"Accelerator(",
)  # fmt: skip
SPEAKS_FP16 = (*CASTS_FP16, *_LOWERS)
SPEAKS_LOW = (*CASTS_LOW, *_LOWERS)
