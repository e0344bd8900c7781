from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Rule,
    any_of,
    constant,
    dotted,
    dtype_triggers,
    lazy_pattern,
    python_edits,
    text_of,
)

#: Names that hold only ids by the conventions of Hugging Face.
_IDS = frozenset({"input_ids", "decoder_input_ids", "token_ids", "label_ids", "token_type_ids", "output_ids"})
#: Words of speech models, whose `input_ids` may be frames of a spectrogram.
_FRAMES = lazy_pattern(r"(?i)whisper|spectrogram|log_?mel")
_BATCH = lazy_pattern(r"(?i)(?:^|_|\.)(?:batch|inputs?|model_inputs|examples?|samples?|encod(?:ing|ed)s?|features)$")
_FLOATING = lazy_pattern(r"is_floating|float|dtype|isinstance|pixel|not in|!=")


class IntegersCastToComputeDtype(Rule):
    """Token ids, or a whole batch that holds them, are cast to FP16 or BF16.

    ## What it does
    Reports casts to a low dtype of `input_ids` and similar names (also `batch["input_ids"]`), and casts of every value
    of a batch's dict (`{k: v.half() for k, v in batch.items()}`) in a file that reads ids from it.

    ## Why is this bad
    FP16 holds integers exactly up to 2048, BF16 up to 256: id 2049 becomes 2048, and a vocabulary has 32,000 or more.
    `Embedding` refuses float indices; code that casts back (`.long()`) or looks them up another way silently trains on
    other tokens.

    ## Fix safety
    The fix removes the cast from the ids and keeps a device move. It is unsafe because code that needs floats stops
    working. There is no fix for a whole dict: cast only what is floating point
    (`v.half() if v.is_floating_point() else v`).

    ## Known limits
    Ids are recognized by their names; `labels`, `indices` and boxes may be floats and are not reported. Nothing is
    reported in code about spectrograms or Whisper, where `input_ids` may be the frames.
    `BatchFeature.to` and `BatchEncoding.to` are not reported either: they cast floating point tensors only.
    """

    code, name = "MPG110", "integers-cast-to-compute-dtype"
    severity = "error"
    message = "{what} in {dtype}: integers above {exact} change"
    help = "remove the cast: an embedding, an index and a loss take integers"
    triggers = (
        any_of(b"input_ids", b"token_ids", b"label_ids", b"token_type_ids", b"output_ids"),
        any_of(b"ids.to(", b"ids.half", b"ids.bfloat16", b"ids.type(", b'ids"]', b"ids']", b".items()", b"ids.cuda",
               b"ids.view", b"ids.reshape", b"ids.contiguous", b"ids.clone", b"ids.detach", b"ids = "),
        any_of(*dtype_triggers.CASTS_LOW_PRECISION),
    )  # fmt: skip
    examples = (
        Bad(
            """\
import torch

def train(model, loader, optimizer):
    cast_dtype = torch.bfloat16
    for batch in loader:
        input_ids = batch["input_ids"].to("cuda", dtype=cast_dtype)  # !
        loss = model(input_ids)
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import torch

def train(model, loader, optimizer):
    cast_dtype = torch.bfloat16
    for batch in loader:
        input_ids = batch["input_ids"].to("cuda")
        loss = model(input_ids)
        loss.backward()
        optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if _FRAMES.search(facts.file_text):
            return
        for cast in facts.events("cast"):
            # BF16 first: it represents fewer integers exactly.
            low = next((dtype for dtype in reversed(HALF_DTYPES) if cast.may_be(dtype)), None)
            if low is None:
                continue
            name = self._ids(cast.subject) or self._assigned_ids(cast, facts)
            whole = self._whole_batch(cast, facts) if not name else ""
            if not name and not whole:
                continue
            yield self.at(
                cast,
                what=f"`{name}`" if name else f"all of `{whole}`",
                dtype=low.label,
                exact=f"{low.largest_exact_integer:,}",
                help=None if name else "Cast floating point values only: `v.half() if v.is_floating_point() else v`",
                fix=self._fix(cast) if name else None,
            )

    def _ids(self, node: cst.CSTNode | None) -> str:
        """Return the name of the ids in an expression, also after moves and views; empty if it is none."""
        while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            if node.func.attr.value not in ("to", "cuda", "contiguous", "view", "reshape", "clone", "detach"):
                return ""
            node = node.func.value
        if isinstance(node, cst.Subscript) and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
            key = constant(node.slice[0].slice.value)
            name = str(key[0]) if key else ""
        else:
            name = dotted(node).rsplit(".", 1)[-1]
        return name if name in _IDS else ""

    def _assigned_ids(self, cast: Event, facts: Facts) -> str:
        """Return the name of ids that the cast value is assigned to: `input_ids = batch[1].to(dtype=...)`."""
        above = facts.parent(cast.call.node)
        if not isinstance(above, cst.Assign) or len(above.targets) != 1:
            return ""
        return self._ids(above.targets[0].target)

    def _whole_batch(self, cast: Event, facts: Facts) -> str:
        """Return the name of the batch if every value of its dict is cast; else empty."""
        if not cast.key or "." in cast.key:
            return ""
        for binding in facts.bindings(cast.key, cast.call, cast.call.guard):
            value = binding.value
            if binding.kind != "for" or binding.index != (1,) or not isinstance(value, cst.Call):
                continue
            owner = dotted(value.func.value) if isinstance(value.func, cst.Attribute) else ""
            items = isinstance(value.func, cst.Attribute) and value.func.attr.value == "items"
            if not items or not _BATCH.search(owner) or facts.is_inference(cast.call):
                return ""
            chosen = cast.call.guard.flags() - set(binding.guard.flags())
            above = facts.parent(cast.call.node)
            while above is not None and not isinstance(above, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                if isinstance(above, cst.DictComp) and above.for_in.ifs:
                    return ""
                if isinstance(above, cst.IfExp) and _FLOATING.search(text_of(above.test)):
                    return ""
                above = facts.parent(above)
            return "" if any(cast.key in flag or _FLOATING.search(flag) or "==" in flag for flag in chosen) else owner
        return ""

    def _fix(self, cast: Event) -> Fix | None:
        call = cast.call
        dtype = call.keywords.get("dtype")
        if call.name == "to" and len(call.node.args) > 1 and (dtype is not None or len(call.positional) > 1):
            edit = python_edits.without_argument(call, dtype if dtype is not None else call.positional[1])
            return Fix("Remove the cast, keep the move", "unsafe", (edit,))
        if len(call.node.args) > 1 or call.is_statement:
            return None
        return Fix("Remove the cast", "unsafe", (python_edits.without_method(call),))
