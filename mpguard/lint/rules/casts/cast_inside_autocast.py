from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    PathCondition,
    Rule,
    any_of,
    compatible,
    python_edits,
)


class CastInsideAutocast(Rule):
    """A tensor is cast to a low dtype by hand inside an autocast region, which would cast it anyway.

    ## What it does
    Reports a cast to FP16 or BF16 within an enabled autocast region if the value is passed unchanged to a model or to
    one of torch's matrix products and convolutions.

    ## Why is this bad
    Autocast casts the inputs of the operations that are safe in low precision and keeps the others in FP32. A cast by
    hand rounds the input of those others too (a norm, a softmax, a loss on top of it). If its dtype is not the
    region's, the value is rounded twice: to the 8 bits of BF16 and to the range of FP16.

    ## Fix safety
    The fix removes the cast and keeps a device move. It is unsafe because all other code that reads the value gets
    FP32.

    ## Known limits
    Reports only casts in the region's own block, and only values that are passed on unchanged. Silent if an option
    switches the region off (`enabled=args.amp`) but not the cast: without the region the model may need it. Casts for
    kernels that autocast does not cover (flash attention, extensions), for storage, and in inference are not reported.
    An FP16 cast of what is trained is reported by MPG101. Preview: the rule has not yet been right on code that its
    authors had not seen. In 344 published packages it reported two casts, both wrongly, and is silent on those since.
    """

    code, name = "MPG105", "cast-inside-autocast"
    severity = "warning"
    preview = True
    message = "`{expr}` casts by hand what autocast casts"
    help = "remove the cast; the region's dtype decides"
    triggers = (
        any_of(b"autocast"),
        any_of(b".half(", b".bfloat16(", b"float16", b"HalfTensor", b" half", b".half"),
    )
    yields_to = ("MPG101", "MPG110", "MPG603", "MPG606")
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x.to("cuda", torch.bfloat16)).sum()  # !
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x.to("cuda")).sum()
    loss.backward()
    optimizer.step()
""",
        ),
        Good(
            """\
import torch
from flash_attn import flash_attn_func

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)
        self.text = torch.nn.Linear(8, 8)
        self.text.requires_grad_(False)

    def forward(self, q, k, v, dtype):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16())
            out = self.proj(out.to(dtype)) + self.text(q.bfloat16())
            self.cache = out.to(torch.bfloat16)
            with torch.autocast("cuda", enabled=False):
                low = self.proj(out.to(torch.bfloat16))
            rounded = self.proj(out.bfloat16().float())
        return self.proj(low.half()) + rounded

@torch.no_grad()
def evaluate(model, loader):
    model.train(False)
    with torch.autocast("cuda"):
        return [model(x.half()) for x in loader]

def extract(model, loader, features):
    model.eval()
    with torch.autocast("cuda"):
        for x in loader:
            features.append(model(x).half())
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for cast in facts.events("cast"):
            region = self._region(cast, facts)
            if region is not None:
                notes = (Note("the autocast region", region.span),)
                yield self.at(
                    cast, expr=facts.short(cast.call.node), notes=notes, fix=python_edits.without_cast(facts, cast)
                )

    def _region(self, cast: Event, facts: Facts) -> Call | None:
        """Return the autocast region that holds both the cast and what takes its value."""
        low = [(dtype, guard) for dtype in HALF_DTYPES for guard in cast.may_be(dtype)]
        if not low or not self._around(cast.call, low[0][1], facts) or facts.is_inference(cast.call):
            return None
        dtype, guard = low[0]
        if facts.training_use.is_rounding_or_copy(cast, dtype) or "model" in facts.kinds(cast.subject, cast.call):
            return None
        for call in facts.training_use.autocast_inputs(cast):
            if (region := self._around(call, guard, facts)) is not None:
                return region
        return None

    def _around(self, call: Call, guard: PathCondition, facts: Facts) -> Call | None:
        """Return a region that is active wherever the call is reached: without one the model may need the cast."""
        regions = facts.autocasts(call, 0)
        unconditional = ((region.call, both) for region, both in regions if not region.guard - call.guard)
        return next((region_call for region_call, both in unconditional if compatible(both, guard)), None)
