from __future__ import annotations

import math
from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Diagnostic,
    Dtype,
    Facts,
    Good,
    Note,
    Rule,
    ScalarUse,
    any_of,
    dtype_triggers,
    lazy_pattern,
    python_edits,
)

#: The largest number of FP16, beyond which `masked_fill` raises; `where` and arithmetic still round up to the second.
_LARGEST, _ROUNDED = 65504.0, 65520.0


class MaskOverflowsHalf(Rule):
    """A finite number outside FP16's range is filled into, or added to, an FP16 tensor.

    ## What it does
    Reports numbers such as `-1e9` that are passed to `masked_fill`, `full_like`, `where`, `clamp`, an indexed
    assignment or an addition, if the tensor is FP16 there: cast to FP16 by hand, created in it, or the result of a
    matmul (`@`, `matmul`, `einsum`, `bmm`, `Linear`) in an FP16 autocast region.

    ## Why is this bad
    FP16 ends at 65504. With torch 2.13, `masked_fill`, `full`, `fill_`, `pad` and `clamp` raise "value cannot be
    converted to type c10::Half without overflow"; `where`, `scores[mask] = -1e9` and arithmetic give `-inf` without a
    warning, and a fully masked row gives NaN after its softmax. BF16 has FP32's range and is not affected.

    ## Fix safety
    Safe: the fix takes the limit from the tensor's own dtype, as intended. There is no fix for additions: the limit
    plus a negative score overflows again; mask with `masked_fill` there. Unsafe for the product with a mask,
    which is added to scores later, and for a tensor without a name, which gets the limit of the dtype that it is cast
    to.

    ## Known limits
    Tensors of unknown dtype are not reported, nor are tensors that `float()`, arithmetic with FP32, or an operation
    that autocast runs in FP32 made FP32 before. `float("-inf")` is not reported: it is infinite on purpose.
    """

    code, name = "MPG601", "mask-overflows-half"
    severity = "error"
    message = "{number} does not fit FP16, which ends at 65504: {effect}"
    help = "use `torch.finfo(x.dtype).min` of the tensor `x` itself, or compute in float32"
    triggers = (
        any_of(*dtype_triggers.MENTIONS_FP16, b"masked_fill", b"torch.where("),
        any_of(b"1e5", b"1e6", b"1e7", b"1e8", b"1e9", b"1e1", b"1e2", b"1e3", b"e+", b"e5", b"e6", b"e9",
               b"e38", b"00000",
               b"99999", b"-9999", b"-7000", b"-8000", b"-9000", b"-655", b"-656", b"2**", b"2 ** ", b"10**", b"10 ** ",
               b"_000", b"_536",
               b"finfo(torch.bfloat16"),
        any_of(b"masked_fill", b"where(", b"full", b"fill_(", b"clamp", b"pad(", b"] = ", b" + ", b" - ", b"* -",
               b"+= "),
    )  # fmt: skip
    #: A number that FP16 cannot hold, or a power that may be one: `2 ** bits`.
    pattern = lazy_pattern(
        rb"[\d.][eE]\+?(?:[5-9]|\d\d)|(?<!\d)(?:[6-9]\d{4}|\d{6})|(?:[6-9]\d|\d{3}|\d_\d{3})_\d{3}"
        rb"|\*\* ?\(?(?:\d\d|[5-9]|[\w.]*(?:bit|BIT))|finfo\(torch\.bfloat16"
    )
    triggers_nearby = (any_of(*dtype_triggers.MENTIONS_FP16),)
    yields_to = ("MPG601",)
    examples = (
        Bad(
            """\
import torch

class Attention(torch.nn.Module):
    def forward(self, q, k, mask):
        return (q @ k).masked_fill(mask, -1e9)  # !
""",
            name="attention.py",
            files={
                "pyproject.toml": "",
                "net.py": """\
import lightning as L

from attention import Attention

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, mask):
        return self.attention(x, x, mask)

    def training_step(self, batch, index):
        return self(*batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
""",
                "train.py": """\
import lightning as L

from net import Net

L.Trainer(precision=16).fit(Net())
""",
            },
        ),
        Good(
            """\
import torch

class Attention(torch.nn.Module):
    def forward(self, q, k, mask):
        return (q @ k).masked_fill(mask, -1e9)
""",
            name="attention.py",
            files={
                "pyproject.toml": "",
                "net.py": """\
import lightning as L

from attention import Attention

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, mask):
        return self.attention(x, x, mask)

    def training_step(self, batch, index):
        return self(*batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
""",
                "train.py": """\
import lightning as L

from net import Net

L.Trainer(precision='bf16-mixed').fit(Net())
""",
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for use in facts.scalars.uses:
            if use.number.limit_of in (Dtype.FP32, Dtype.FP64) or not self._overflows(use):
                continue
            found = facts.precision.low(use.tensor, use.record, Dtype.FP16)
            if found is None:
                continue
            effect = f"`{use.name}` raises" if use.how == "raises" else "it becomes infinite"
            cause = "autocast computes it in FP16 here" if found.by_autocast else "it is FP16 from here"
            notes = (Note(cause, found.origin.span, facts.elsewhere(found.origin)),) if found.origin else ()
            number = f"`{facts.short(use.node)}`"
            yield self.at(
                use, number=number, effect=effect, notes=notes, fix=python_edits.limit_of_own_dtype(use, found, facts)
            )

    def _overflows(self, use: ScalarUse) -> bool:
        value = use.number.value
        if not math.isfinite(value) or abs(value) <= (_LARGEST if use.how == "raises" else _ROUNDED):
            return False
        return use.kind != "scale" or value < 0  # `x * 1e5` is arithmetic, `(1 - mask) * -1e9` a mask
