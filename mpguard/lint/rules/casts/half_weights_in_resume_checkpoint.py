from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Bad, Diagnostic, Facts, Good, Note, Rule, any_of


class HalfWeightsInResumeCheckpoint(Rule):
    """The checkpoint that a run resumes from stores its weights in FP16 or BF16.

    ## What it does
    Reports a cast to FP16 or BF16 whose result is written by the same call as an optimizer's `state_dict()`: a
    checkpoint with an optimizer's state is written to resume from.

    ## Why is this bad
    The run trains FP32 master weights, and every resume rounds them to 11 (FP16) or 8 (BF16) bits. Updates that were
    smaller than that are lost, and the optimizer's moments belong to other weights. A value above 65504 becomes
    infinite in FP16.

    ## Known limits
    Preview: some projects save a half copy on purpose, to save space, and document what a resume loses. Weights and
    optimizer in separate files are not recognized, nor is a checkpoint that another function writes than the one that
    casts: a model that is cast where it is created trains in that dtype.
    """

    code, name = "MPG111", "half-weights-in-resume-checkpoint"
    severity = "warning"
    preview = True
    message = "`{expr}` stores the weights in {dtype} in a checkpoint to resume from"
    help = "save the FP32 weights in it, and a half copy for inference in a separate file"
    triggers = (
        any_of(b".half(", b".bfloat16(", b"float16", b".half", b" half"),
        any_of(b".state_dict("),
        any_of(b"save"),
        any_of(b"ptim"),
    )
    examples = (
        Bad(
            """\
from copy import deepcopy

import torch

def save(model, optimizer, epoch):
    state = {
        "epoch": epoch,
        "model": deepcopy(model).half(),  # !
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, "last.pt")

class Run:
    def save(self):
        weights = {k: v.to(torch.bfloat16) for k, v in self.model.state_dict().items()}  # !
        torch.save({"model": weights, "optimizer": self.optimizer.state_dict()}, "last.pt")
"""
        ),
        Good(
            """\
from copy import deepcopy

import torch

def save(model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    torch.save({"model": deepcopy(model).half()}, "inference.pt")
    torch.save({k: v.half() for k, v in model.state_dict().items()}, "weights.pt")

def convert(path):
    state = torch.load(path)
    torch.save({k: v.half() for k, v in state["model"].items()}, "half.pt")
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        casts = [(cast, dtype) for cast in facts.events("cast") for dtype in HALF_DTYPES if cast.may_be(dtype)]
        if not casts or not facts.events("state"):
            return
        resumed = {
            write: saved for saved in facts.checkpoints.saved("optimizer") for write in facts.checkpoints.writes(saved)
        }
        for cast, dtype in casts if resumed else ():
            # A model that is cast where it is created trains in that dtype: its checkpoint rounds nothing.
            writes = (write for write in facts.checkpoints.writes(cast) if write.scope is cast.call.scope)
            written = next((write for write in writes if write in resumed), None)
            if written is not None:
                notes = (
                    Note("the optimizer's state in the same checkpoint", resumed[written].span),
                    Note("written here", written.span),
                )
                yield self.at(cast, expr=facts.short(cast.call.node), dtype=dtype.label, notes=notes)
