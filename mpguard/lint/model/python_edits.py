"""Edits of Python code that several rules' fixes use.

All are text edits at the spans of libcst nodes. A statement that is alone on its line is removed with
the line; new lines get the indentation of the line next to them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.text_edits import Edit
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.records import Call, Record, With
from mpguard.lint.model.rule import Applicability, Fix
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.behaviour.precision import TensorDtype
    from mpguard.lint.facts.behaviour.scalars import ScalarUse
    from mpguard.lint.facts.file import Facts


def replaced(node: cst.CSTNode, at: Record, text: str) -> Edit:
    """Replace the code of a node by `text`."""
    return Edit(*at.chunk.span(node), text)


def after(node: cst.CSTNode, at: Record, text: str) -> Edit:
    """Insert `text` directly after a node and its parentheses."""
    end = at.chunk.outer_span(node)[1]
    return Edit(end, end, text)


def without_method(call: Call, instead: str = "") -> Edit:
    """Replace `receiver.method(...)` by `receiver`, followed by `instead`."""
    assert call.receiver is not None
    return Edit(call.chunk.outer_span(call.receiver)[1], call.span[1], instead)


def without_argument(call: Call, value: cst.BaseExpression) -> Edit:
    """Remove one argument of a call, with its keyword and one comma."""
    spans = [(arg.value, call.chunk.outer_span(arg)) for arg in call.node.args]
    place = next((i for i, (each, _) in enumerate(spans) if each is value), None)
    if place is None:  # an item of a mapping: the engine drops the fix
        call.chunk.places.setdefault(value, value)
        return Edit(*call.chunk.span(value), "")
    first, last = spans[place][1]
    if place + 1 < len(spans):
        return Edit(first, spans[place + 1][1][0], "")
    if place:
        before = call.node.args[place - 1]
        keyword = before.keyword if before.keyword is not None else before.value
        end = max(call.chunk.outer_span(before.value)[1], call.chunk.outer_span(keyword)[1])
        return Edit(end, call.chunk.outer_span(value)[1], "")  # a trailing comma, and the line of the bracket, stay
    return Edit(first, last, "")


def with_argument(facts: Facts, call: Call, text: str) -> Edit:
    """Add an argument to the end of a call."""
    if call.node.args:
        return after(call.node.args[-1].value, call, f", {text}")
    end = facts.source.text.index("(", call.chunk.outer_span(call.func)[1]) + 1
    return Edit(end, end, text)


def through(facts: Facts, backward: Event, owner: str, method: str = "backward") -> Edit | None:
    """Replace `loss.backward(...)` by `owner.method(loss, ...)`; None if it is given a gradient."""
    call, loss = backward.call, backward.subject
    if call.positional or call.starred or loss is None:
        return None
    keywords = "".join(f", {name}={facts.text(value, call)}" for name, value in call.keywords.items())
    inner = facts.source.text[slice(*facts.span(loss, call))]  # without its own parentheses
    if isinstance(loss, (cst.Tuple, cst.GeneratorExp, cst.Yield, cst.NamedExpr)):
        inner = facts.text(loss, call)
    return replaced(call.node, call, f"{owner}.{method}({inner}{keywords})")


def without_statement(facts: Facts, record: Call) -> Edit:
    """Return the edit that removes a statement and its line; it becomes `pass` where a block would be left empty.

    Of a line with several statements only this one is removed.
    """
    first, last = record.chunk.span(record.statement)
    line = record.line
    if isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)) and len(line.body) > 1:
        spans = [record.chunk.span(each) for each in line.body]
        place = spans.index((first, last))
        return Edit(first, spans[place + 1][0], "") if place + 1 < len(spans) else Edit(spans[place - 1][1], last, "")
    if not isinstance(line, cst.SimpleStatementLine):
        return Edit(first, last, "pass")
    block = facts.index.parents.get(line)
    if isinstance(block, cst.IndentedBlock) and len(block.body) == 1:
        return Edit(first, last, "pass")
    text = facts.source.text
    start, end = line_start(facts, first), last
    while end < len(text) and text[end] not in "\r\n":
        end += 1
    end += 2 if text.startswith("\r\n", end) else 1
    return Edit(start, min(end, len(text)), "")


def without_cast(facts: Facts, cast: Event) -> Fix | None:
    """Remove a manual cast and keep a device move; None where a branch or a conditional would be empty."""
    call, title = cast.call, "Remove the cast"
    if call.receiver is not cast.subject:  # torch.Tensor.half(x)
        return Fix(title, "unsafe", (replaced(call.node, call, facts.text(call.node.args[0].value, call)),))
    arguments = [arg for arg in call.node.args if arg.keyword is None or arg.keyword.value in ("device", "dtype")]
    if call.name == "to" and len(arguments) > 1:
        dtype = call.keywords.get("dtype")
        edit = without_argument(call, call.positional[1] if dtype is None else dtype)
        return Fix("Remove the cast, keep the move", "unsafe", (edit,))
    if call.name == "type" and constant(call.argument(0, "dtype")) == ("torch.cuda.HalfTensor",):
        return Fix("Remove the cast, keep the move", "unsafe", (without_method(call, ".cuda()"),))
    above = facts.index.parents.get(call.node)
    if isinstance(above, (cst.NamedExpr, cst.IfExp, cst.Lambda)):
        return None  # `(x := x)`, `x if fp16 else x`
    statement = call.statement
    useless = isinstance(statement, cst.Assign) and (
        statement.value is call.node
        and len(statement.targets) == 1
        and dotted(statement.targets[0].target) == cast.key != ""
    )
    part = isinstance(cast.subject, cst.Subscript) and dotted(cast.subject.value)  # model[0]
    plain = part or (isinstance(cast.subject, (cst.Name, cst.Attribute)) and cast.key)
    if useless or (call.is_statement and plain):
        edit = without_statement(facts, call)
        return Fix(title, "unsafe", (edit,)) if edit.text != "pass" else None
    return Fix(title, "unsafe", (without_method(call),))


def line_start(facts: Facts, offset: int) -> int:
    """Return the offset at which the line of an offset begins."""
    text = facts.source.text
    return max(text.rfind("\n", 0, offset), text.rfind("\r", 0, offset)) + 1


def indentation(facts: Facts, offset: int) -> str:
    """Return the white space before the code of the line of an offset."""
    text, start = facts.source.text, line_start(facts, offset)
    end = start
    while end < len(text) and text[end] in " \t":
        end += 1
    return text[start:end]


def _statement_of_shared_line(facts: Facts, node: cst.CSTNode, at: Record) -> tuple[int, int] | None:
    """Return the span of the statement of `at` if its line holds more than that statement, else None.

    Such a line holds several statements (`a(); b()`), or is the body of a compound statement (`if x: a()`):
    a new line above or below it would be at the wrong place.
    """
    line = node if isinstance(node, (cst.SimpleStatementLine, cst.SimpleStatementSuite)) else None
    if line is None and isinstance(node, cst.BaseSmallStatement):
        line = facts.index.parents.get(node)  # type: ignore[assignment]
    if line is None or (isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1):
        return None
    spans = [at.chunk.span(statement) for statement in line.body]
    return next((span for span in spans if span[0] <= at.span[0] < span[1]), None)


def line_before(facts: Facts, node: cst.CSTNode, at: Record, code: str) -> Edit:
    """Return the edit that inserts `code` above the statement `node`; before the statement of `at` on a shared line."""
    shared = _statement_of_shared_line(facts, node, at)
    if shared is not None:
        return Edit(shared[0], shared[0], f"{code}; ")
    first = at.chunk.span(node)[0]
    start = line_start(facts, first)
    return Edit(start, start, f"{indentation(facts, first)}{code}\n")


def line_after(facts: Facts, node: cst.CSTNode, at: Record, code: str) -> Edit:
    """Return the edit that inserts `code` below the simple statement `node` and the comment on its line.

    On a shared line the code is inserted after the statement of `at`.
    """
    shared = _statement_of_shared_line(facts, node, at)
    if shared is not None:
        return Edit(shared[1], shared[1], f"; {code}")
    first, last = at.chunk.span(node)
    text = facts.source.text
    while last < len(text) and text[last] not in "\r\n":
        last += 1
    return Edit(last, last, f"\n{indentation(facts, first)}{code}")


def moved_out(facts: Facts, call: Call, item: With) -> list[Edit] | None:
    """Move the statement of a call, and all that follow it in the block of a `with`, out of the block.

    None where the `with` has other items, or its block would be empty. Comments, line endings and tabs stay.
    """
    node = item.node
    if not isinstance(node, cst.With) or len(node.items) != 1 or not isinstance(node.body, cst.IndentedBlock):
        return None
    spans = [call.chunk.outer_span(statement) for statement in node.body.body]
    place = next((i for i, (first, last) in enumerate(spans) if first <= call.span[0] < last), 0)
    if place == 0:
        return None
    line = node.body.body[place]
    if isinstance(line, cst.SimpleStatementLine) and call.chunk.span(line.body[0])[1] <= call.span[0]:
        return None  # the statements before it on its line would be moved too
    start, end = line_start(facts, spans[place][0]), spans[-1][1]
    text = facts.source.text[start:end]
    outer = indentation(facts, call.chunk.span(node)[0])
    inner = indentation(facts, call.chunk.span(node.body.body[place])[0])
    if any(sign in text for sign in ('"""', "'''", "\\\n", "\\\r")) or not inner.startswith(outer) or inner == outer:
        return None  # a string that spans several lines would change
    lines = [
        match.start() for match in re.finditer(r"^", text.replace("\r\n", " \n").replace("\r", "\n"), re.MULTILINE)
    ]
    return [
        Edit(start + first + len(outer), start + first + len(inner), "")
        for first in lines
        if text.startswith(inner, first)
    ]


def name_of_torch(facts: Facts) -> str | None:
    """Return the file's name for torch (`import torch as th`); None if it does not import the whole of it."""
    for key, bindings in facts.module.bindings.items():
        if any(binding.kind == "import" and binding.target == "torch" for binding in bindings):
            return key
    return None


def limit_of_own_dtype(use: ScalarUse, found: TensorDtype, facts: Facts) -> Fix | None:
    """Return a fix that replaces the number by the limit of the tensor's own dtype.

    A tensor without a name gets the limit of the dtype that was found for it, if that was set by a cast.
    """
    torch, key = name_of_torch(facts), dotted(use.tensor)
    if torch is None or use.kind == "add":
        return None
    limit = "min" if use.number.value < 0 else "max"
    if key:
        text = f"{torch}.finfo({key}.dtype).{limit}"
        # The product with a mask is added to scores, where it may still become infinite.
        safe: Applicability = "unsafe" if use.kind == "scale" else "safe"
        return Fix(f"Take the limit from `{key}`'s own dtype", safe, (replaced(use.node, use.record, text),))
    if not isinstance(found.dtype, Dtype) or found.by_autocast or found.guard - use.record.guard:
        return None
    text = f"{torch}.finfo({torch}.{found.dtype.torch_name}).{limit}"
    return Fix(f"Take the limit of {found.dtype.label}", "unsafe", (replaced(use.node, use.record, text),))
