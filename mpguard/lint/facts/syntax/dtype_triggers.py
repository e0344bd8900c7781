"""Triggers for rules that need `facts.precision`: the byte strings by which code produces a low-precision tensor."""


def _creation_patterns(*dtypes: bytes) -> tuple[bytes, ...]:
    """Return the ways in which code uses a dtype to create or cast a tensor.

    Those that test one (`x.dtype in (torch.float16, ...)`) are excluded.
    """
    ways = (b"dtype=", b" = ", b"else ", b"return ", b"(", b".to(", b".type(", b", ")
    ends = {b"(": b")", b", ": b")"}
    return tuple(way + b"torch." + dtype + ends.get(way, b"") for way in ways for dtype in dtypes)


#: A file that contains none of these does not name `torch.half`: not the word in a sentence, nor `rotate_half`.
NAMES_HALF = (b".half", b"import half", b", half", b" half,", b" half\n")
#: A file that contains none of these casts nothing to FP16, or to a low-precision dtype.
CASTS_FP16 = (
    *_creation_patterns(b"float16", b"half"), b".half()", b"HalfTensor", b"import torch as", b"import float16",
    b"import half",
)  # fmt: skip
CASTS_LOW_PRECISION = (
    *CASTS_FP16, *_creation_patterns(b"bfloat16"), b".bfloat16()", b"BFloat16Tensor", b"import bfloat16",
)  # fmt: skip
#: A dtype by its name, `torch_dtype="bfloat16"` or `{"bf16": {"enabled": True}}`, or that of autocast by default.
NAMED_LOW_PRECISION = (
    b'"bfloat16"', b"'bfloat16'", b'"float16"', b"'float16'", b'"bf16": {', b'"fp16": {',
    b"autocast()", b"autocast(enabled=", b'autocast("cuda")', b"autocast('cuda')",
)  # fmt: skip
_AUTOCASTS = (
    b".autocast(", b" autocast(", b"@autocast", b"import autocast", b"autocast as", b"amp.autocast", b"Accelerator(",
    b"LightningModule",
)  # fmt: skip
#: A file that contains none of these has no tensor in FP16, or in low precision, by a cast or by autocast.
MENTIONS_FP16 = (*CASTS_FP16, *_AUTOCASTS)
MENTIONS_LOW_PRECISION = (*CASTS_LOW_PRECISION, *_AUTOCASTS)
