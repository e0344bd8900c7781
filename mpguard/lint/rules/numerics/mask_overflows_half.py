from __future__ import annotations

import math
from collections.abc import Iterator

from mpguard.lint import (
    MENTIONS_FP16,
    Bad,
    Diagnostic,
    Dtype,
    Facts,
    Good,
    Note,
    Rule,
    ScalarUse,
    any_of,
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
    matrix product (`@`, `matmul`, `einsum`, `bmm`, `Linear`) in an FP16 autocast region.

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
        any_of(*MENTIONS_FP16, b"masked_fill", b"torch.where("),
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
    triggers_nearby = (any_of(*MENTIONS_FP16),)
    yields_to = ("MPG609",)
    examples = (
        *(
            example(
                "import torch\n\nclass Attention(torch.nn.Module):\n    def forward(self, q, k, mask):\n"
                f"        return (q @ k).masked_fill(mask, -1e9){marker}\n",
                files={
                    "pyproject.toml": "",
                    "net.py": "import lightning as L\n\nfrom attention import Attention\n\n"
                    "class Net(L.LightningModule):\n    def __init__(self):\n        super().__init__()\n"
                    "        self.attention = Attention()\n\n    def forward(self, x, mask):\n"
                    "        return self.attention(x, x, mask)\n\n    def training_step(self, batch, index):\n"
                    "        return self(*batch).mean()\n\n    def configure_optimizers(self):\n"
                    "        return torch.optim.SGD(self.parameters(), 0.1)\n",
                    "train.py": "import lightning as L\n\nfrom net import Net\n\n"
                    f"L.Trainer(precision={precision}).fit(Net())\n",
                },
                name="attention.py",
            )
            for example, precision, marker in (
                (Bad, "16", "  # !"),
                (Bad, "'16-mixed'", "  # !"),
                (Good, "'bf16-mixed'", ""),
                (Good, "32", ""),
                (Good, "options.precision", ""),
            )
        ),
        Bad(
            """\
import torch

def attention(q, k, v, mask):
    scores = q.half() @ k.half().transpose(-1, -2)
    scores = scores.masked_fill(mask, -1e9)  # !
    return scores.float().softmax(-1) @ v
""",
            fixed="""\
import torch

def attention(q, k, v, mask):
    scores = q.half() @ k.half().transpose(-1, -2)
    scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    return scores.float().softmax(-1) @ v
""",
        ),
        Bad(
            """\
import math
import torch
import torch.nn as nn

NEG = -1e9

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, n, d = x.shape
        q = self.key(x).view(b, n, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(q, q.transpose(-1, -2)) / math.sqrt(d)
        scores = scores * self.scale
        scores = torch.where(mask, scores, NEG)  # !
        scores[mask] = -100000.0  # !
        scores.masked_fill_(mask, float("-1e20"))  # !
        return torch.softmax(scores, dim=-1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(64, 4)

    def forward(self, x, mask):
        return self.attention(x, mask)

def train(loader):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler()
    for x, mask in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, mask).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import math
import torch
import torch.nn as nn

NEG = -1e9

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, n, d = x.shape
        q = self.key(x).view(b, n, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(q, q.transpose(-1, -2)) / math.sqrt(d)
        scores = scores * self.scale
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        scores[mask] = torch.finfo(scores.dtype).min
        scores.masked_fill_(mask, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(64, 4)

    def forward(self, x, mask):
        return self.attention(x, mask)

def train(loader):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler()
    for x, mask in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, mask).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch as th

def one(x, y, fp16):
    if fp16:
        y = y.half()
    return y.masked_fill_(x, -1e5)  # !

def two(x, mask):
    def fill(scores):
        return scores.masked_fill(mask, -1e30)  # !
    return fill(x.half())
""",
            fixed="""\
import torch as th

def one(x, y, fp16):
    if fp16:
        y = y.half()
    return y.masked_fill_(x, th.finfo(y.dtype).min)

def two(x, mask):
    def fill(scores):
        return scores.masked_fill(mask, th.finfo(scores.dtype).min)
    return fill(x.half())
""",
        ),
        Bad(
            """\
import torch as th
from torch.cuda.amp import autocast

@autocast()
def one(q, k, mask):
    return th.einsum("id,jd->ij", q, k).masked_fill(mask, value=-2 ** 31)  # !

def two(n):
    return th.zeros(n, dtype=th.float16) + -1e5  # !
"""
        ),
        Bad(
            """\
import torch as th

def biases(n, mask, q, k):
    bias = th.full((n, n), -1e10, dtype=th.float16)  # !
    extended = (1.0 - mask.to(th.half)) * -10000000.0  # !
    return (q.half() @ k.half()).masked_fill(mask == 0, -1e9) + bias + extended  # !
""",
            fixed="""\
import torch as th

def biases(n, mask, q, k):
    bias = th.full((n, n), th.finfo(th.float16).min, dtype=th.float16)
    extended = (1.0 - mask.to(th.half)) * th.finfo(th.float16).min
    return (q.half() @ k.half()).masked_fill(mask == 0, th.finfo(th.float16).min) + bias + extended
""",
        ),
        Good(
            """\
import torch

def upcast(q, k, mask, bias):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = torch.matmul(q, k)
        one = scores.float().masked_fill(mask, -1e9)
        two = scores.softmax(-1).masked_fill(mask, -1e9)  # FP32 under CUDA's autocast
        three = (scores + bias).masked_fill(mask, -1e9)  # what `bias` is nobody knows
        four = scores.masked_fill(mask, -65504.0).masked_fill(mask, float("-inf"))
        five = scores.masked_fill(mask, -1e4)
        with torch.autocast("cuda", enabled=False):
            six = torch.matmul(q.float(), k.float()).masked_fill(mask, -1e9)
        seven = (scores.float() + 1).masked_fill(mask, -1e9)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eight = torch.matmul(q, k).masked_fill(mask, -1e9)
    return one, two, three, four, five, six, seven, eight

def outside(x, mask, beams):
    x = x.half()
    x = x.float()
    scores = torch.zeros(4, 4)
    scores[mask] = -1e9
    best = -1e9
    return x.masked_fill(mask, -1e9), beams.masked_fill(mask, -1e9), max(best, 1e5), scores

def flags(x, mask, fp16):
    if fp16:
        x = x.half()
        x = x.masked_fill(mask, -1e4)
    else:
        x = x.masked_fill(mask, -1e9)
    if fp16:
        x = x.float()
    return x.masked_fill(mask, -1e9) if not fp16 else x
"""
        ),
        Good(
            """\
import torch

def chosen(scores, mask):
    if scores.dtype == torch.float16:
        scores = scores.masked_fill(mask, torch.finfo(torch.float16).min)
    else:
        scores = scores.masked_fill(mask, -1e9)
    return scores

def own(scores, mask):
    scores = scores.half()
    value = -1e9 if scores.dtype == torch.float32 else -1e4
    scores = scores.masked_fill(mask, value)
    return scores * 100000 if mask is None else scores, torch.where(mask, scores, -65510)
"""
        ),
        Bad(
            """\
import torch

def attend(scores, mask):
    return scores.half().masked_fill(mask, -1_000_000_000.0)  # !

def quantize(x, bits=32):
    return x.half().masked_fill(x.isnan(), -(2 ** (bits - 1)))  # !
""",
            fixed="""\
import torch

def attend(scores, mask):
    return scores.half().masked_fill(mask, torch.finfo(torch.float16).min)

def quantize(x, bits=32):
    return x.half().masked_fill(x.isnan(), torch.finfo(torch.float16).min)
""",
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
