from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Bad, Call, Diagnostic, Event, Facts, Good, Note, Rule, any_of


class HalfWeightsInResumeCheckpoint(Rule):
    """The checkpoint that a run resumes from stores its weights in FP16 or BF16.

    ## What it does
    Reports a cast to FP16 or BF16 whose result is written by the same call as an optimizer's `state_dict()`: a
    checkpoint with an optimizer's state is written to resume from. Also a cast in a helper, of this file or another,
    that returns the values of its argument cast: `shrink(model.state_dict())`.

    ## Why is this bad
    The run trains FP32 master weights, and every resume rounds them to 11 (FP16) or 8 (BF16) bits. Updates that were
    smaller than that are lost, and the optimizer's moments belong to other weights. A value above 65504 becomes
    infinite in FP16.

    ## Known limits
    Preview: some projects save a half copy on purpose, to save space, and document what a resume loses. Weights and
    optimizer in separate files are not recognized, nor is a checkpoint that another function writes than the one that
    casts, or calls the helper that does: a model that is cast where it is created trains in that dtype.
    """

    code, name = "MPG111", "half-weights-in-resume-checkpoint"
    severity = "warning"
    preview = True
    message = "`{expr}` stores the weights in {dtype} in a checkpoint to resume from"
    help = "save the FP32 weights in it, and a half copy for inference in a separate file"
    triggers = (
        any_of(b".half(", b".bfloat16(", b"float16", b".half", b" half"),
        any_of(b".state_dict(", b".items()", b".values()"),
    )
    triggers_nearby = (any_of(b".state_dict("), any_of(b"save"), any_of(b"ptim"))
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
        for cast, dtype in casts:
            passed = [(facts.of(call), call) for call in facts.checkpoints.passed_through(cast)]
            for home, call in [(facts, cast.call), *passed]:
                if (written := self._written(home, call)) is None:
                    continue
                write, saved = written
                other = facts.elsewhere(write)
                kept = Note("the optimizer's state in the same checkpoint", saved.span, other)
                notes = (kept, Note("written here", write.span, other))
                yield self.at(cast, expr=facts.short(cast.call.node), dtype=dtype.label, notes=notes)
                break

    @staticmethod
    def _written(facts: Facts, value: Call) -> tuple[Call, Event] | None:
        """Return the call that writes a value and an optimizer's state, and that state."""
        resumed = {
            write: saved for saved in facts.checkpoints.saved("optimizer") for write in facts.checkpoints.writes(saved)
        }
        # A model that is cast where it is created trains in that dtype: its checkpoint rounds nothing.
        writes = facts.checkpoints.writes(value) if resumed else ()
        return next(((each, resumed[each]) for each in writes if each in resumed and each.scope is value.scope), None)
