"""Put one known mistake at a time into real training programs and configs, and count how many the linter sees.

    python benchmarks/seeded.py run FOLDER --half open [--per-kind 40] -o SEEDED.json
    python benchmarks/seeded.py record SEEDED.json     # adds the counts to seeded.json

FOLDER and the halves are those of corpus.py. A program is a Python file of the corpus in which the default rules,
without MPG302 and MPG305, report nothing; a config is an accelerate YAML or a DeepSpeed JSON of which that is true.
Each kind of mistake says what it changes, which rules have to see it, and in which programs it is one. For each kind,
up to `--per-kind` programs are drawn by the hash of their names, at most three of a repository. A mutant counts as
found if one of the kind's rules reports something in it. No file is written: the mutant is checked in memory, at the
place of the original, as a part of its project, so that its imports, users and configs are those of the repository.

Some changes are no mistakes, and are left out (the batches up to `wide10` counted them as missed, except where it says
so there):

- in code that nothing runs: a function or class that no file of the repository mentions elsewhere, a module without a
  main part that none mentions, a test, and a trial on random tensors below `if __name__ == "__main__":`, or (since
  `wide12`) in a function that makes its inputs as `torch.rand(2, 4)` and reads no data;
- a cast in a program that only measures how fast steps are (a file or folder named `bench...`, `profile` or `speed`);
- a key in a DeepSpeed config of a project that pins a DeepSpeed which still has it, or a misspelt section that is off;
- positions that BF16 holds exactly (up to a small literal, a small default, the size of a batch or of a window) where
  no power or logarithm of them follows;
- torch's clipping after gradients that the program unscales itself, and code that does not import the name `torch`;
- an autocast that a constant of an imported module switches off, and an autocast in BF16 around a model whose module
  has its own autocast, which needs the scaler (both since `wide12`);
- a call that only a comment contains (since `wide12`);
- an average that is copied but never updated: `weight_decay` says nothing about that;
- in a benchmark by its name (`benchmark_50m.py`), and in an example of another package of which the project contains a
  copy that nothing runs: no rule reports anything there, as the documentation says (both since `wide13`);
- a kind whose rules are all off by default (since `wide13`: MPG704);
- a cast in a program of ColossalAI, which has its own mixed precision, as those of the other frameworks (since
  `wide13`);
- a key in a DeepSpeed config of a project whose conda environment pins a DeepSpeed which still has it (since `wide13`);
- `loss.backward()` and torch's clipping under an Accelerator that a constant makes BF16, or sets to no mixed precision,
  without a plugin (and, for `backward`, without accumulation), which does the same (since `wide14`);
- `loss.backward()` and torch's clipping under an Accelerator in a repository that names neither a precision, a plugin
  nor accelerate's launcher (since `wide18`);
- an autocast that only `torch.inference_mode()` enters, a batch that is rounded and cast back to FP32 at once, and a
  function that only a comment calls (all since `wide15`);
- `torch.float16` in code that imports torch under another name, a function that other files only define themselves (a
  copy of the file is no user), and code that a statement which raises whenever it runs precedes, as the linter finds
  it: a name that nothing binds, an import of what a module of the project lacks; a scaler where each autocast is
  switched off by `enabled=False` (all since `wide18`);
- what is a mistake only in versions of a package that the project's requirements rule out (since `wide28`);
- a module that no other file imports or names as a file, where it is no script, inputs of a model in a program that
  freezes one, adapters (for MPG107 and 602, which leave them out), and words in docstrings (all since `wide41`).

A batch of integers that is cast to FP16 counts as found by MPG110 too, which reports just that.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import functools
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst

from mpguard.lint.model.rule import BaseRule, Rule, rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.project.questions.copies import is_copied_example
from mpguard.lint.project.requirements import required
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, kind_of
from mpguard.lint.source.test_paths import is_test

_spec = importlib.util.spec_from_file_location("corpus", Path(__file__).with_name("corpus.py"))
assert _spec is not None and _spec.loader is not None
corpus = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(corpus)

RESULTS = Path(__file__).with_name("seeded.json")
LARGEST = 100 << 10
PER_REPOSITORY = 3
#: The programs of one repository that are tried for a kind: one with a hundred recipes must not take all the time.
TRIES = 12

_COMMENT = re.compile(r"""(?m)^ *#.*|(?s:\"\"\".*?\"\"\"|'''.*?''')""")
Mutate = Callable[[str], "str | None"]


class Kind(NamedTuple):
    """One kind of mistake. rules: one of them has to see it; words: what a program contains; never: what it does not.

    alone: words that no Python file and no list of requirements of the repository contains. imported: words that no
    module of the repository that the program imports contains. somewhere: what some text of the repository contains.
    trains: the mistake is none in a program that only measures speed.
    """

    name: str
    rules: tuple[str, ...]
    mutate: Mutate
    words: tuple[str, ...]
    never: str = ""
    alone: str = ""
    imported: str = ""
    suffixes: tuple[str, ...] = (".py",)
    trains: bool = False
    somewhere: str = ""

    def fits(self, text: str) -> bool:
        run = _COMMENT.sub("", text)  # a word in a comment is none of the program
        return all(re.search(word, run) for word in self.words) and not (self.never and re.search(self.never, text))


KINDS: list[Kind] = []


def kind(
    codes: str,
    *words: str,
    never: str = "",
    alone: str = "",
    imported: str = "",
    suffixes: tuple[str, ...] = (".py",),
    trains: bool = False,
    somewhere: str = "",
) -> Callable[[Mutate], Mutate]:
    """Register a function `text -> mutated text, or None` as a kind of mistake."""

    def register(mutate: Mutate) -> Mutate:
        name = mutate.__name__.replace("_", "-")
        rules = tuple(f"MPG{code}" for code in codes.split())
        KINDS.append(Kind(name, rules, mutate, words, never, alone, imported, suffixes, trains, somewhere))
        return mutate

    return register


# -- changes of syntax trees --------------------------------------------------------------------------


def code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node).strip()


def statement(text: str) -> cst.BaseStatement:
    return cst.parse_statement(text)


def called(node: cst.CSTNode | None, name: str, of: str = "") -> bool:
    """True if the node is a call of a method or function with this name. of: a pattern for what the method is of."""
    if not isinstance(node, cst.Call):
        return False
    if isinstance(node.func, cst.Attribute):
        return node.func.attr.value == name and bool(re.search(of, code(node.func.value)))
    return not of and isinstance(node.func, cst.Name) and node.func.value == name


def expression(line: cst.CSTNode) -> cst.BaseExpression | None:
    """Return the expression, or the assigned value, of a line with one statement."""
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        small = line.body[0]
        if isinstance(small, cst.Expr | cst.Assign):
            return small.value
    return None


class Change(cst.CSTTransformer):
    """A transformer that counts its changes, and may change each list of statements."""

    changes = 0

    def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        return body

    def _whole(self, updated: Any) -> Any:
        body = self.statements(list(updated.body))
        return updated.with_changes(body=body or [statement("pass")])

    def leave_IndentedBlock(self, _: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:
        return self._whole(updated_node)

    def leave_Module(self, _: cst.Module, updated_node: cst.Module) -> Any:
        return self._whole(updated_node)


def changed(text: str, *changes: Change) -> str | None:
    """Return the text after all changes, or None if one of them found nothing to change."""
    module = cst.parse_module(text)
    for change in changes:
        module = module.visit(change)
        if not change.changes:
            return None
    return module.code


class Drop(Change):
    """Remove the statements that are calls of a method."""

    def __init__(self, name: str, of: str) -> None:
        self.name, self.of = name, of

    def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        kept = [line for line in body if not called(expression(line), self.name, self.of)]
        self.changes += len(body) - len(kept)
        return kept


class Replace(Change):
    """Replace calls. how: the new expression for a call, or None."""

    def __init__(self, how: Callable[[cst.Call], cst.BaseExpression | None], most: int = 1000) -> None:
        self.how, self.most = how, most

    def leave_Call(self, _: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if self.changes < self.most and (new := self.how(updated_node)) is not None:
            self.changes += 1
            return new
        return updated_node


class Insert(Change):
    """Insert statements before, or after, the first line that is asked for."""

    def __init__(self, new: Callable[[cst.BaseStatement], list[str]], after: bool = False) -> None:
        self.new, self.after = new, after

    def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        result: list[cst.BaseStatement] = []
        for line in body:
            new = [] if self.changes else [statement(each) for each in self.new(line)]
            self.changes += bool(new)
            result += [line, *new] if self.after else [*new, line]
        return result


class Pairs(Change):
    """Replace the first two neighbouring statements that are asked for."""

    def __init__(self, how: Callable[[Any, Any], list[cst.BaseStatement] | None], most: int = 1) -> None:
        self.how, self.most = how, most

    def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        for i in range(len(body) - 1):
            if self.changes < self.most and (new := self.how(body[i], body[i + 1])) is not None:
                self.changes += 1
                return [*body[:i], *new, *body[i + 2 :]]
        return body


SCALER = r"(?i)scaler$"


def argument(call: cst.Call, name: str) -> cst.Arg | None:
    return next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def with_argument(call: cst.Call, name: str, value: str) -> cst.Call:
    """Return the call with a keyword argument set."""
    new = cst.Arg(cst.parse_expression(value), cst.Name(name), equal=cst.AssignEqual(
        cst.SimpleWhitespace(""), cst.SimpleWhitespace("")))  # fmt: skip
    kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != name]
    before = [arg for arg in kept if arg.star != "**"]
    return call.with_changes(args=[*before, new, *(arg for arg in kept if arg.star == "**")])


def _scaled(node: cst.CSTNode | None) -> cst.Call | None:
    """Return the call `scaler.scale(...)` of `scaler.scale(...).backward(...)`."""
    if called(node, "backward") and isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        inner = node.func.value
        if called(inner, "scale", SCALER) and isinstance(inner, cst.Call) and len(inner.args) == 1:
            return inner
    return None


def _unscaled_backward(call: cst.Call) -> cst.BaseExpression | None:
    scaled = _scaled(call)
    if scaled is None:
        return None
    loss = scaled.args[0].value
    loss = loss if isinstance(loss, cst.Name | cst.Attribute | cst.Call) else cst.parse_expression(f"({code(loss)})")
    return call.with_changes(func=call.func.with_changes(value=loss))


def _plain_step(call: cst.Call) -> cst.BaseExpression | None:
    if called(call, "step", SCALER) and len(call.args) == 1:
        return cst.parse_expression(f"{code(call.args[0].value)}.step()")
    return None


def _autocast(call: cst.CSTNode | None) -> bool:
    return called(call, "autocast") and not re.search("accelerator|^te", code(call).split("(")[0])


def _autocast_with(dtype: str) -> Callable[[cst.Call], cst.BaseExpression | None]:
    return lambda call: with_argument(call, "dtype", dtype) if _autocast(call) else None


# -- loss scaling -------------------------------------------------------------------------------------

OTHER = r"apex|deepspeed|accelerat|lightning|\bpl\.|colossalai"
FP16_LOOP = (
    r"GradScaler\(",
    r"autocast\((?! *False|[^()\n]*enabled *= *False)",
    r"\.scale\(.*\)\.backward\(",
    r"[sS]caler\.step\(",
)


#: A constant that switches autocast off.
AMP_OFF = r"(?m)^ *(?:use_)?amp(?: *: *bool)? *= *False *$"


@kind("201", *FP16_LOOP, never=OTHER + r"|bfloat16|bf16", imported=AMP_OFF)
def scaler_removed(text: str) -> str | None:
    """Remove the scaler altogether, where nothing else mentions it."""
    new = _without_scaler(text)
    new = new and changed(new, _DropCreation())
    rest = re.sub(r"(?m)^ *(from|import) .*|#.*", "", new or "")
    return None if re.search("[sS]caler", rest) else new


@kind("202 201", *FP16_LOOP, never=OTHER + r"|bfloat16|bf16", imported=AMP_OFF)
def scaler_scales_nothing(text: str) -> str | None:
    return _without_scaler(text)


class _DropCreation(Change):
    def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        kept = [line for line in body if not called(expression(line), "GradScaler")]
        self.changes += len(body) - len(kept)
        return kept


def _without_scaler(text: str) -> str | None:
    """Return the text with plain backward and steps in place of those of the scaler, or None if some are left."""
    new = changed(text, Replace(_unscaled_backward), Replace(_plain_step))
    for name in ("update", "unscale_"):
        new = new and (changed(new, Drop(name, SCALER)) or new)
    return None if new is None or re.search(r"[sS]caler\.(scale|step|unscale_)\(", new) else new


@kind(
    "201 211",  # 211 says it of FSDP
    r"autocast\(",
    r"dtype=torch\.bfloat16",
    r"\.backward\(",
    r"\.step\(",
    never=OTHER + r"|[sS]caler|(no_grad|inference_mode)\(\),|float16\b(?<!bfloat16)|half\(",
)
def autocast_bf16_to_fp16(text: str) -> str | None:
    def swap(call: cst.Call) -> cst.BaseExpression | None:
        dtype = argument(call, "dtype")
        enabled = argument(call, "enabled")
        if enabled is not None and code(enabled.value) == "False":
            return None
        if _autocast(call) and dtype is not None and code(dtype.value) == "torch.bfloat16":
            return with_argument(call, "dtype", "torch.float16")
        return None

    return changed(text, Replace(swap))


@kind("202", *FP16_LOOP)
def scale_dropped(text: str) -> str | None:
    return changed(text, Replace(_unscaled_backward))


@kind("202", *FP16_LOOP)
def scaled_loss_discarded(text: str) -> str | None:
    class Split(Change):
        def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
            result: list[cst.BaseStatement] = []
            for line in body:
                call = expression(line)
                scaled = _scaled(call)
                if scaled is not None and isinstance(scaled.args[0].value, cst.Name):
                    self.changes += 1
                    result += [statement(code(scaled)), statement(code(_unscaled_backward(call)))]  # type: ignore[arg-type]
                else:
                    result.append(line)
            return result

    return changed(text, Split())


@kind("203", *FP16_LOOP)
def step_bypasses_scaler(text: str) -> str | None:
    return changed(text, Replace(_plain_step))


@kind("204", r"GradScaler\(", r"[sS]caler\.step\(", r"[sS]caler\.update\(\)")
def update_dropped(text: str) -> str | None:
    return changed(text, Drop("update", SCALER))


@kind("204 206", r"[sS]caler\.step\(", r"[sS]caler\.update\(\)")
def update_before_step(text: str) -> str | None:
    def swap(first: Any, second: Any) -> list[cst.BaseStatement] | None:
        if called(expression(first), "step", SCALER) and called(expression(second), "update", SCALER):
            return [second, first]
        return None

    return changed(text, Pairs(swap))


CLIP = r"clip_grad_(norm|value)_"


def _clips(line: cst.CSTNode) -> bool:
    """True if the line clips: `clip_grad_value_(parameters, None)` of VITS and its relatives returns the norm only."""
    call = expression(line)
    clips = any(called(call, f"clip_grad_{which}_") for which in ("norm", "value"))
    return clips and not any(code(each.value) == "None" for each in call.args)  # type: ignore[union-attr]


@kind("205", r"[sS]caler\.unscale_\(", r"clip_grad_(norm|value)_\(", r"\.scale\(.*\)\.backward\(")
def unscale_dropped(text: str) -> str | None:
    def without(first: Any, second: Any) -> list[cst.BaseStatement] | None:
        return [second] if called(expression(first), "unscale_", SCALER) and _clips(second) else None

    return changed(text, Pairs(without, most=1000))


@kind("205", r"[sS]caler\.unscale_\(", r"clip_grad_(norm|value)_\(", r"\.scale\(.*\)\.backward\(")
def clip_before_unscale(text: str) -> str | None:
    def swap(first: Any, second: Any) -> list[cst.BaseStatement] | None:
        return [second, first] if called(expression(first), "unscale_", SCALER) and _clips(second) else None

    return changed(text, Pairs(swap, most=1000))


@kind("206", r"[sS]caler\.unscale_\(")
def unscale_twice(text: str) -> str | None:
    def again(line: cst.BaseStatement) -> list[str]:
        return [code(line)] if called(expression(line), "unscale_", SCALER) else []

    return changed(text, Insert(again, after=True))


@kind(
    "207",
    *FP16_LOOP,
    never=OTHER + r"|bfloat16|bf16|GradScaler\([^)\n]*enabled",
    imported=AMP_OFF + r"|autocast\(",
)
def autocast_fp16_to_bf16(text: str) -> str | None:
    return changed(text, Replace(_autocast_with("torch.bfloat16")))


@kind("208", r"optimizer\w*\.state_dict\(\)", r"[sS]caler\.state_dict\(\)", r"GradScaler\(", r"load_state_dict\(")
def scaler_left_out_of_checkpoint(text: str) -> str | None:
    class Entry(Change):
        def leave_Dict(self, _: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
            kept = [
                each
                for each in updated_node.elements
                if not (isinstance(each, cst.DictElement) and called(each.value, "state_dict", SCALER))
            ]
            self.changes += len(kept) < len(updated_node.elements)
            return updated_node.with_changes(elements=kept)

    return changed(text, Entry())


@kind("209", r"= *(torch\.(cuda\.)?amp\.|amp\.)?GradScaler\(", r"\bfor ", r"[sS]caler\.step\(")
def scaler_made_in_loop(text: str) -> str | None:
    def made(line: cst.CSTNode) -> bool:
        return called(expression(line), "GradScaler") and isinstance(line.body[0], cst.Assign)  # type: ignore[attr-defined]

    class Into(Change):
        def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
            where = next((i for i, line in enumerate(body) if made(line)), None)
            if where is None:
                return body
            name = code(body[where].body[0].targets[0].target)  # type: ignore[union-attr, index]
            for i in range(where + 1, len(body)):
                loop = body[i]
                if (
                    isinstance(loop, cst.For)
                    and isinstance(loop.body, cst.IndentedBlock)
                    and f"{name}.step(" in code(loop)
                ):
                    self.changes += 1
                    inner = loop.body.with_changes(body=[body[where], *loop.body.body])
                    return [*body[:where], *body[where + 1 : i], loop.with_changes(body=inner), *body[i + 1 :]]
            return body

    return changed(text, Into())


@kind("206", r"[sS]caler\.step\(", r"[sS]caler\.update\(\)", r"\bif .*%.*:")
def update_at_each_micro_batch(text: str) -> str | None:
    class Out(Change):
        def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
            result: list[cst.BaseStatement] = []
            for line in body:
                result.append(line)
                if not (isinstance(line, cst.If) and line.orelse is None and isinstance(line.body, cst.IndentedBlock)):
                    continue
                inner = list(line.body.body)
                update = [each for each in inner if called(expression(each), "update", SCALER)]
                steps = [each for each in inner if called(expression(each), "step", SCALER)]
                if update and steps and "accum" in code(line.test) and "%" in code(line.test):
                    self.changes += 1
                    kept = [each for each in inner if each not in update]
                    result[-1:] = [line.with_changes(body=line.body.with_changes(body=kept)), *update]
            return result

    return changed(text, Out())


# -- casts --------------------------------------------------------------------------------------------

OPTIMIZER = r"=\s*(torch\.)?optim\.\w+\(\s*\w+\.parameters\(\)"
LOOP = (r"\.backward\(", r"\.step\(\)")


def _trained_model(line: cst.CSTNode) -> str:
    """Return the name of the model whose parameters the optimizer of this line gets: all of them, as one list."""
    call = expression(line)
    if (
        isinstance(call, cst.Call)
        and re.match(r"(torch\.)?optim\.(Adam|AdamW|SGD|RMSprop)$", code(call.func))
        and call.args
    ):
        first = call.args[0].value
        if called(first, "parameters") and isinstance(first.func.value, cst.Name):  # type: ignore[union-attr]
            return first.func.value.value  # type: ignore[union-attr]
    return ""


def _before_optimizer(*lines: str) -> Callable[[cst.BaseStatement], list[str]]:
    def new(line: cst.BaseStatement) -> list[str]:
        name = _trained_model(line)
        return [each.format(name) for each in lines] if name else []

    return new


#: Binds the name `torch`.
TORCH = r"(?m)^ *import torch *(?:\.\w+ *)*(?:,|;|#|$)"
PLAIN = OTHER + r"|bfloat16|float16|\.half\(\)|[sS]caler|autocast|fp16|quantiz"


@kind("101", OPTIMIZER, *LOOP, "import torch", never=PLAIN, trains=True)
def model_half(text: str) -> str | None:
    return changed(text, Insert(_before_optimizer("{0}.half()")))


@kind("101", OPTIMIZER, *LOOP, TORCH, never=PLAIN, trains=True)
def model_to_float16(text: str) -> str | None:
    return changed(text, Insert(_before_optimizer("{0} = {0}.to(torch.float16)")))


@kind(
    "101 110",
    r"\bfor ",
    r"\.backward\(\)",
    r"\.step\(\)",
    r"= \w+\.(to|cuda)\(",
    "import torch",
    never=PLAIN + r"|requires_grad(?:_\(| *= *)False|[fF]reez|frozen",  # what takes the input may not be trained
    trains=True,
)
def batch_half(text: str) -> str | None:
    """Cast an input of the model in the loop that runs backward."""

    class Cast(Change):
        def leave_For(self, _: cst.For, updated_node: cst.For) -> cst.For:
            body = updated_node.body
            if self.changes or not isinstance(body, cst.IndentedBlock):
                return updated_node
            direct = [
                re.sub(r"(?m)^ *#.*", "", code(line)) for line in body.body if isinstance(line, cst.SimpleStatementLine)
            ]
            if not any(".backward(" in line for line in direct):
                return updated_node
            lines = list(body.body)
            for i, line in enumerate(lines):
                call = expression(line)
                if not (called(call, "to") or called(call, "cuda")) or not isinstance(line.body[0], cst.Assign):  # type: ignore[union-attr, index]
                    continue
                name = code(line.body[0].targets[0].target)  # type: ignore[union-attr, index]
                used = rf"\b\w*(model|net|encoder|generator)\w*\(\s*{re.escape(name)}\b(?!\.float\(\)|[^,)]*\.long\(\))"
                if code(call.func.value) == name and any(re.search(used, each) for each in direct):  # type: ignore[union-attr]
                    self.changes += 1
                    lines.insert(i + 1, statement(f"{name} = {name}.half()"))
                    break
            return updated_node.with_changes(body=body.with_changes(body=lines))

    return changed(text, Cast())


#: The rules about weights in low precision leave out adapters.
ADAPTERS = "|peft|[lL]ora"


@kind("107", OPTIMIZER, *LOOP, TORCH, never=PLAIN + ADAPTERS, trains=True)
def model_to_bfloat16(text: str) -> str | None:
    return changed(text, Insert(_before_optimizer("{0} = {0}.to(torch.bfloat16)")))


@kind("104", OPTIMIZER, *LOOP, r"(?m)^import torch$", never=PLAIN + "|set_default", trains=True)
def default_dtype_half(text: str) -> str | None:
    def new(line: cst.BaseStatement) -> list[str]:
        return ["torch.set_default_dtype(torch.float16)"] if code(line) == "import torch" else []

    return changed(text, Insert(new, after=True))


@kind("602", r"optim\.AdamW?\(\s*\w+\.parameters\(\)", *LOOP, "import torch", never=PLAIN + ADAPTERS, trains=True)
def adam_eps_for_half_weights(text: str) -> str | None:
    def half(line: cst.BaseStatement) -> list[str]:
        return _before_optimizer("{0}.half()")(line) if re.search(r"optim\.AdamW?\(", code(line)) else []

    def eps(call: cst.Call) -> cst.BaseExpression | None:
        if re.match(r"(torch\.)?optim\.AdamW?$", code(call.func)) and argument(call, "eps") is None:
            return with_argument(call, "eps", "1e-8")
        return None

    return changed(text, Replace(eps), Insert(half))


@kind(
    "108",
    r"torch\.arange\([^()]*(\([^()]*\)[^()]*)*\)\.float\(\)|arange\(.*dtype=torch\.float(32)?\b",
    never="float16|half",
)
def positions_in_bfloat16(text: str) -> str | None:
    def small(arange: Any) -> bool:
        plain = [arg.value for arg in arange.args if arg.keyword is None]
        end = code(plain[1] if len(plain) > 1 else plain[0]) if plain else ""
        default = re.search(rf"\b{re.escape(end.split('.')[-1])}\b(?:\s*:\s*\w+)?\s*=\s*(\d+)\b", text) if end else None
        known = int(end) if end.isdigit() else int(default[1]) if default else None
        after = text[text.find(code(arange)) :][:400]
        if re.search(r"\*\*|\blog\(", after):
            return False  # what is computed from them is rounded, however small they are
        return (known is not None and known <= 256) or bool(re.search(r"(?i)batch_?size|\bbsz?\b|window|\bws\b", end))

    def cast(call: cst.Call) -> cst.BaseExpression | None:
        arange = call.func.value if called(call, "float") else call  # type: ignore[union-attr]
        if called(arange, "arange") and small(arange):
            return None
        if called(call, "float") and called(call.func.value, "arange"):  # type: ignore[union-attr]
            return call.with_changes(func=call.func.with_changes(attr=cst.Name("bfloat16")))
        dtype = argument(call, "dtype")
        if called(call, "arange") and dtype is not None and re.match(r"torch\.float(32)?$", code(dtype.value)):
            return with_argument(call, "dtype", "torch.bfloat16")
        return None

    return changed(text, Replace(cast))


@kind(
    "109",
    r"(?i)ema\w* *= *(copy\.)?deepcopy\(",
    r"(?i)mul_\(|lerp|(?<!weight_)(?<!weight)(?<!lr_)decay|update\w*ema|ema\w*update",
    never=r"\.half\(|float16",
)
def ema_in_half(text: str) -> str | None:
    """Cast the copy of a model; a copied state or a list of copies has no `bfloat16()`."""
    copied = r"(copy\.)?deepcopy\((?!.*(state_dict|params|master))[\w.]+\)(\.(to|cuda|eval)\([\w.]*\))*"

    class Cast(Change):
        def leave_Assign(self, _: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
            if re.search("(?i)ema", code(updated_node.targets[0].target)) and re.fullmatch(
                copied, code(updated_node.value)
            ):
                self.changes += 1
                return updated_node.with_changes(value=cst.parse_expression(f"{code(updated_node.value)}.bfloat16()"))
            return updated_node

    return changed(text, Cast())


# -- autocast -----------------------------------------------------------------------------------------


def _region(line: cst.CSTNode) -> bool:
    """True if the line is a `with` of an autocast that is not switched off."""
    if not (isinstance(line, cst.With) and isinstance(line.body, cst.IndentedBlock)):
        return False
    return _autocast(line.items[0].item) and "enabled=False" not in code(line.items[0].item)


@kind("301", r"with .*autocast\(", r"\.backward\(")
def backward_in_autocast(text: str) -> str | None:
    def into(first: Any, second: Any) -> list[cst.BaseStatement] | None:
        if _region(first) and called(expression(second), "backward"):
            return [first.with_changes(body=first.body.with_changes(body=[*first.body.body, second]))]
        return None

    return changed(text, Pairs(into))


@kind("304", r"with .*autocast\(", r"\.backward\(")
def autocast_not_entered(text: str) -> str | None:
    class Out(Change):
        def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
            result: list[cst.BaseStatement] = []
            for line in body:
                if _region(line) and len(line.items) == 1 and not self.changes:  # type: ignore[attr-defined]
                    self.changes += 1
                    result += [statement(code(line.items[0].item)), *line.body.body]  # type: ignore[attr-defined]
                else:
                    result.append(line)
            return result

    return changed(text, Out())


@kind("306", r"with .*autocast\((?! *False| *enabled *= *False)", r"binary_cross_entropy_with_logits")
def bce_under_autocast(text: str) -> str | None:
    class Within(Change):
        depth = 0

        def visit_With(self, node: cst.With) -> None:
            self.depth += _region(node)

        def leave_With(self, _: cst.With, updated_node: cst.With) -> cst.With:
            self.depth -= _region(_)
            return updated_node

        def leave_Call(self, _: cst.Call, updated_node: cst.Call) -> cst.Call:
            if self.depth and called(updated_node, "binary_cross_entropy_with_logits"):
                self.changes += 1
                new = code(updated_node.func).replace("_with_logits", "")
                return updated_node.with_changes(func=cst.parse_expression(new))
            return updated_node

    return changed(text, Within())


# -- FP8 ----------------------------------------------------------------------------------------------

#: Names of modules, as opposed to functions that are compiled (`forward`, `do_teacher`).
_MODULE = r"(?i)model|net|module|encoder|decoder|backbone|transformer|policy|gpt|dit"
FLOAT8 = ("from torchao.float8 import convert_to_float8_training", "convert_to_float8_training({0})")


@kind("401", OPTIMIZER, *LOOP, "import torch", never=PLAIN + "|float8", alone=r"torch\.compile|dynamo|\.compile\(")
def float8_without_compile(text: str) -> str | None:
    return changed(text, Insert(_before_optimizer(*FLOAT8)))


@kind("401", r"= *torch\.compile\(\w+", *LOOP, never="float8|deepspeed|accelerat|lightning")
def float8_and_compile_dropped(text: str) -> str | None:
    """Convert the model where it was compiled, whatever the options are."""

    class Instead(Change):
        def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
            result: list[cst.BaseStatement] = []
            for line in body:
                if isinstance(line, cst.If) and "compile" in code(line.test) and FLOAT8[0] in code(line.body):
                    assert isinstance(line.body, cst.IndentedBlock)
                    result += [each for each in line.body.body if "convert_to_float8_training" in code(each)]
                    continue
                call = expression(line)
                if (
                    called(call, "compile", "^torch$")
                    and isinstance(call.args[0].value, cst.Name)  # type: ignore[union-attr]
                    and re.search(_MODULE, call.args[0].value.value)  # type: ignore[union-attr]
                ):
                    self.changes += 1
                    name = call.args[0].value.value  # type: ignore[union-attr]
                    result += [statement(each.format(name)) for each in FLOAT8]
                else:
                    result.append(line)
            return result

    new = changed(text, Instead())
    return new if new is not None and "compile(" not in new else None


# -- frameworks ---------------------------------------------------------------------------------------


def _renamed(old: str, new: str, of: str) -> Callable[[cst.Call], cst.BaseExpression | None]:
    def how(call: cst.Call) -> cst.BaseExpression | None:
        return call.with_changes(func=cst.parse_expression(new)) if called(call, old, of) else None

    return how


#: An Accelerator that adds nothing to the backward pass and the clipping.
_ADDS_NOTHING = r"\bAccelerator\((?![^)]*(?:{}))[^)]*\bmixed_precision *= *[\"'](?:bf16|no)[\"']"


#: What gives an Accelerator a precision, or an engine.
_LAUNCHES = r"accelerate launch|accelerate config|accelerate\.commands|mixed_precision|[Pp]lugin"


@kind(
    "501",
    r"accelerator\.prepare\(",
    r"accelerator\.backward\(",
    never=_ADDS_NOTHING.format("steps|plugin"),
    somewhere=_LAUNCHES,
)
def backward_outside_accelerator(text: str) -> str | None:
    def how(call: cst.Call) -> cst.BaseExpression | None:
        if called(call, "backward", "accelerator$") and isinstance(call.args[0].value, cst.Name):
            return cst.parse_expression(f"{call.args[0].value.value}.backward()")
        return None

    return changed(text, Replace(how))


@kind(
    "503",
    r"accelerator\.prepare\(",
    r"accelerator\.clip_grad_norm_\(",
    r"(?m)^import torch *(?:,|#|$)",
    never=rf"unscale_\(|{_ADDS_NOTHING.format('plugin')}",
    somewhere=_LAUNCHES,
)
def clip_outside_accelerator(text: str) -> str | None:
    return changed(text, Replace(_renamed("clip_grad_norm_", "torch.nn.utils.clip_grad_norm_", "accelerator$")))


@kind(
    "502 862",  # 862 says it where a launch config has another dtype
    r"accelerator\.prepare\(",
    r"accelerator\.backward\(",
    r"= *(unet|model|net|transformer)\(",
    r"(?m)^import torch *(?:,|#|$)",
    never="autocast|[sS]caler",
)
def autocast_under_accelerator(text: str) -> str | None:
    class Around(Change):
        def statements(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
            if self.changes or not any("accelerator.backward(" in code(line) for line in body):
                return body
            for i, line in enumerate(body):
                call = expression(line)
                found = re.match(r"(unet|model|net|transformer)\(", code(call)) if call is not None else None
                if found and re.search(rf"accelerator\.prepare\([^)]*\b{found[1]}\b", text):
                    self.changes += 1
                    region = cst.parse_statement('with torch.autocast("cuda"):\n    pass\n')
                    assert isinstance(region, cst.With)
                    return [*body[:i], region.with_changes(body=cst.IndentedBlock([line])), *body[i + 1 :]]
            return body

    return changed(text, Around())


@kind(
    "501",
    r"deepspeed\.initialize\(",
    r"\boptimizer=optimizer\b",
    r"\b\w*engine\w*\.step\(\)",
    never=r"\boptimizer\b.*= *deepspeed\.initialize",  # there, the name is that of the engine's optimizer
)
def step_outside_deepspeed(text: str) -> str | None:
    return re.sub(r"\b\w*engine\w*\.step\(\)", "optimizer.step()", text)


@kind("506", r"TrainingArguments\(", never=r"class \w*TrainingArguments|bf16|fp16")
def training_arguments_fp16_and_bf16(text: str) -> str | None:
    def both(call: cst.Call) -> cst.BaseExpression | None:
        if called(call, "TrainingArguments") and not any(arg.star for arg in call.args):
            return with_argument(with_argument(call, "fp16", "True"), "bf16", "True")
        return None

    return changed(text, Replace(both))


@kind(
    "103 107",
    r"TrainingArguments\(",
    r"fp16=True",
    r"from_pretrained\(",
    r"Trainer\(",
    never="peft|[lL]ora|load_in|dtype|deepspeed",
)
def trainer_with_half_model(text: str) -> str | None:
    def load(call: cst.Call) -> cst.BaseExpression | None:
        if called(call, "from_pretrained") and re.search("Model", code(call.func)):
            return with_argument(call, "torch_dtype", "torch.float16")
        return None

    new = changed(text, Replace(load))
    return new and (new if "import torch\n" in new else "import torch\n" + new)


@kind(
    "103 201 107",
    r"(?s)(transformers|diffusers)\b.*from_pretrained\(",
    OPTIMIZER,
    *LOOP,
    "import torch",
    never=OTHER + "|peft|[lL]ora|load_in|dtype|[sS]caler|autocast",
)
def half_weights_in_optimizer(text: str) -> str | None:
    """Load the model that the optimizer gets in FP16."""
    trained = re.search(r"optim\.\w+\(\s*(\w+)\.parameters\(\)", text)
    assert trained is not None

    class Load(Change):
        def leave_Assign(self, _: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
            call = updated_node.value
            if (
                code(updated_node.targets[0].target) == trained[1]
                and called(call, "from_pretrained")
                and "**" not in code(call)
            ):
                self.changes += 1
                assert isinstance(updated_node.value, cst.Call)
                return updated_node.with_changes(
                    value=with_argument(updated_node.value, "torch_dtype", "torch.float16")
                )
            return updated_node

    return changed(text, Load())


@kind("509", r"MixedPrecision(Policy)?\(", r"reduce_dtype=torch\.float32")
def low_precision_reduction(text: str) -> str | None:
    def how(call: cst.Call) -> cst.BaseExpression | None:
        dtype = argument(call, "reduce_dtype")
        if (
            re.search(r"MixedPrecision(Policy)?$", code(call.func))
            and dtype is not None
            and "float32" in code(dtype.value)
        ):
            return with_argument(call, "reduce_dtype", "torch.bfloat16")
        return None

    return changed(text, Replace(how))


@kind("515", r"\b(pl|L|lightning|pytorch_lightning)\.Trainer\(", r"[tT]rainer\w*\)?\.fit\(", never="precision")
def lightning_without_masters(text: str) -> str | None:
    def how(call: cst.Call) -> cst.BaseExpression | None:
        if re.match(r"(pl|L|lightning|pytorch_lightning)\.Trainer$", code(call.func)):
            return with_argument(call, "precision", '"bf16-true"')
        return None

    return changed(text, Replace(how))


@kind(
    "704",
    r"set_float32_matmul_precision\(.high.\)",
    r"\.backward\(|\.fit\(",
    never="(?i)autocast|bf16|bfloat16|fp16|float16|mixed",  # there, products in BF16 are what is wanted
)
def matmul_precision_medium(text: str) -> str | None:
    return re.sub(r"set_float32_matmul_precision\((.)high.\)", r"set_float32_matmul_precision(\1medium\1)", text)


# -- configs ------------------------------------------------------------------------------------------

JSON, YAML = (".json",), (".yaml", ".yml")
DEEPSPEED = (r'"(fp16|bf16)"\s*:\s*\{', r'"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)"')
ACCELERATE = (r"(?m)^compute_environment:", r"(?m)^distributed_type:")


def _json(text: str, change: Callable[[dict[str, Any]], bool]) -> str | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return json.dumps(data, indent=2) if isinstance(data, dict) and change(data) else None


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _older(version: str) -> str:
    """Return a pattern for a requirement that allows no DeepSpeed as new as a version `0.x.y`."""
    _, minor, patch = map(int, version.split("."))
    older = "|".join(
        [*(rf"{each}(?!\d)" for each in range(minor)), *(rf"{minor}\.{each}(?!\d)" for each in range(patch))]
    )
    pinned = rf"""deepspeed[^\n"']{{0,24}}(?:==|~=|<=?)\s*v?0\.(?:{older})"""
    return rf"""(?i){pinned}|name = "deepspeed"\nversion = "0\.(?:{older})"""


@kind("821", *DEEPSPEED, suffixes=JSON)
def deepspeed_fp16_and_bf16(text: str) -> str | None:
    return _json(text, lambda data: not data.update(fp16={"enabled": True}, bf16={"enabled": True}))


@kind("822", *DEEPSPEED, alone=_older("0.17.1"), suffixes=JSON)
def deepspeed_loss_scale_under_bf16(text: str) -> str | None:
    def change(data: dict[str, Any]) -> bool:
        data.pop("fp16", None)
        data["bf16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
        return True

    return _json(text, change)


@kind("823", *DEEPSPEED, suffixes=JSON)
def deepspeed_misspelt_section(text: str) -> str | None:
    def change(data: dict[str, Any]) -> bool:
        old = "bf16" if "bf16" in data else "fp16"
        if _section(data, old).get("enabled") in (True, "auto"):
            data["bfloat_16" if old == "bf16" else "fp_16"] = data.pop(old)
            return True
        return False

    return _json(text, change)


@kind("828", *DEEPSPEED, r'"loss_scale"', suffixes=JSON)
def deepspeed_static_loss_scale(text: str) -> str | None:
    def change(data: dict[str, Any]) -> bool:
        fp16 = _section(data, "fp16")
        if fp16.get("enabled") in (True, "auto") and fp16.get("loss_scale") == 0:
            fp16["loss_scale"] = 128
            return True
        return False

    return _json(text, change)


@kind("821", *DEEPSPEED, suffixes=JSON)
def deepspeed_two_dtypes(text: str) -> str | None:
    def change(data: dict[str, Any]) -> bool:
        if "auto" in (_section(data, "fp16").get("enabled"), _section(data, "bf16").get("enabled")):
            return False
        data.pop("fp16", None)
        data["bf16"] = {"enabled": True}
        data["torch_autocast"] = {"enabled": True, "dtype": "float16"}
        return True

    return _json(text, change)


@kind("826", *DEEPSPEED, alone=_older("0.19.6"), suffixes=JSON)
def deepspeed_amp_section(text: str) -> str | None:
    return _json(text, lambda data: not data.update(amp={"enabled": True, "opt_level": "O1"}))


@kind("802", *ACCELERATE, r"(?m)^mixed_precision: *\S", suffixes=YAML)
def accelerate_unquoted_no(text: str) -> str | None:
    return re.sub(r"(?m)^mixed_precision:.*$", "mixed_precision: no", text)


@kind("813", *ACCELERATE, r"(?m)^mixed_precision: *\S", suffixes=YAML)
def accelerate_unknown_key(text: str) -> str | None:
    return re.sub(r"(?m)^mixed_precision:", "mixed_precison:", text)


@kind("801", *ACCELERATE, r"(?m)^( +)fsdp_auto_wrap_policy:", suffixes=YAML)
def accelerate_unknown_fsdp_key(text: str) -> str | None:
    return re.sub(r"(?m)^( +)fsdp_auto_wrap_policy:", r"\1fsdp_auto_wrap_polic:", text)


@kind("804", *ACCELERATE, r"(?m)^deepspeed_config:\n +\w", r"(?m)^mixed_precision: *\S", suffixes=YAML)
def accelerate_deepspeed_key_overrides(text: str) -> str | None:
    now = re.search(r"(?m)^mixed_precision: *['\"]?(\w+)", text)
    other = "fp16" if now is None or now[1] == "bf16" else "bf16"
    return re.sub(r"(?m)^deepspeed_config:\n( +)", rf"deepspeed_config:\n\1mixed_precision: {other}\n\1", text)


# -- the measurement ----------------------------------------------------------------------------------


class Program(NamedTuple):
    repository: str
    path: Path
    text: str


class Outcome(NamedTuple):
    kind: str
    repository: str
    path: str
    found: list[str]


#: What the Python programs of some kind contain.
WORDS = re.compile(r"\.backward\(|Trainer|GradScaler|autocast|MixedPrecision|custom_fwd|arange\(|ema")
RULES = rules(own_only=True)
ENGINE = Engine(RULES, Options(Selectors()))


def reported(path: Path, text: str) -> list[str]:
    """Return the codes that the default rules report in a text at this place, without the frequent ones."""
    data = text.encode()
    what = kind_of(str(path))
    assert what is not None
    report = ENGINE.content(data, Target(str(path), what, data=data, named=True, size=len(data)), with_project=True)
    return sorted({each.code for each in report.findings} - set(corpus.FREQUENT))


def programs(folder: Path, which: str) -> dict[str, list[Program]]:
    """Return the readable files of the half, by suffix, in the order of their hashes."""
    found: dict[str, list[Program]] = collections.defaultdict(list)
    for repository in corpus.repositories():
        where = folder / repository.folder
        if which not in ("all", repository.half) or not where.is_dir():
            continue
        for path in where.rglob("*"):
            if path.suffix in (".py", ".json", ".yaml", ".yml") and path.is_file() and path.stat().st_size <= LARGEST:
                if re.search(r"(^|/)\.git/|test", path.relative_to(where).as_posix()):
                    continue
                try:
                    text = path.read_text("utf-8")
                except ValueError:
                    continue
                if path.suffix != ".py" or (
                    WORDS.search(text) and re.search(r"\btorch\b|lightning|transformers", text)
                ):
                    found[path.suffix].append(Program(repository.name, path, text))

    def order(program: Program) -> str:
        name = f"{corpus.SEED} {program.repository} {program.path.relative_to(folder)}"
        return hashlib.sha256(name.encode()).hexdigest()

    return {suffix: sorted(each, key=order) for suffix, each in found.items()}


def words_of(folder: Path, repository: str, pattern: str, cache: dict[tuple[str, str], bool]) -> bool:
    """True if a Python file or a list of requirements of the repository contains the pattern."""
    if (repository, pattern) not in cache:
        where = folder / repository.replace("/", "+")
        files = (
            each
            for name in ("*.py", "*requirements*.txt", "requirements/*.txt", "*.toml", "*.lock", "*environment*.y*ml")
            for each in where.rglob(name)
            if each.is_file()
        )
        cache[repository, pattern] = any(re.search(pattern, each.read_text("utf-8", "replace")) for each in files)
    return cache[repository, pattern]


def imports(folder: Path, program: Program, pattern: str) -> bool:
    """True if a module of the repository that the program imports contains the pattern."""
    where = folder / program.repository.replace("/", "+")
    roots = [each for each in program.path.parents if each.is_relative_to(where)]
    for module, name in re.findall(r"(?m)^ *(?:from|import) +\.*([\w.]+)(?: +import +(\w+))?", program.text):
        for path in {module.replace(".", "/"), f"{module}.{name}".replace(".", "/")}:
            for file in (root / f"{path}.py" for root in roots):
                if file.is_file() and re.search(pattern, file.read_text("utf-8", "replace")):
                    return True
    return False


#: Files and folders of programs that only measure.
_MEASURES = re.compile(r"(?i)(?:^|[/_.])(?:bench\w*|profil\w*|speed\w*)(?:[/_.]|$)")
#: What makes random tensors of a fixed size; what gives other data.
_TRIAL = re.compile(r"torch\.randn?\(\s*[\[(]?\d+,(?s:.*)\.backward\(")
_READS_DATA = re.compile(r"(?i)loader|dataset|\bdata\b|batch|parse_args|open\(")
_TEXTS = (".py", ".sh", ".yaml", ".yml", ".md", ".ipynb", ".json", ".toml", ".cfg", ".txt", "")


@functools.cache
def imported(path: Path) -> set[tuple[str, ...]]:
    """Return the modules that a file imports, and what it imports of them, by the parts of their names."""
    try:
        tree = ast.parse(path.read_text("utf-8", "replace"))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module or ''}.{each.name}" for each in node.names)}
    return {tuple(name.strip(".").split(".")) for name in names if name.strip(".")}


class Users:
    """The words of the files of repositories, to see what nothing mentions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._words: dict[str, dict[Path, set[str]]] = {}

    def mention(self, program: Program, name: str) -> bool:
        """True if another file of the repository contains a name as a word, and does not define it itself."""
        where = self.folder / program.repository.replace("/", "+")
        if program.repository not in self._words:
            texts = (path for path in where.rglob("*") if path.suffix in _TEXTS and path.is_file())
            self._words[program.repository] = {
                path: set(re.findall(r"\w+", text)) - set(re.findall(r"(?m)^(?:async +)?(?:def|class) +(\w+)", text))
                for path in texts
                if path.stat().st_size <= LARGEST and "/.git/" not in path.as_posix()
                for text in [path.read_text("utf-8", "replace")]
            }
        return any(name in words for path, words in self._words[program.repository].items() if path != program.path)

    def contain(self, program: Program, pattern: str, but: Path | None = None) -> bool:
        """True if a text contains a pattern. but: a file of the repository that does not count, nor do comments."""
        where = self.folder / program.repository.replace("/", "+")
        for path in where.rglob("*"):
            if path.suffix in _TEXTS and path.is_file() and path.stat().st_size <= LARGEST and path != but:
                text = path.read_text("utf-8", "replace")
                if re.search(pattern, re.sub("#.*", "", text) if but and path.suffix == ".py" else text):
                    return True
        return False

    def name_module(self, program: Program) -> bool:
        """True if another file imports a module or names its file: a word alone, as that of a variable, does not."""
        if not self.mention(program, program.path.stem):
            return False
        where = self.folder / program.repository.replace("/", "+")
        module = program.path.relative_to(where).with_suffix("").parts
        stem = re.escape(program.path.stem)
        if self.contain(program, rf"\b{stem}\.py\b|[\"'][\w./]*\b{stem}[\"']", but=program.path):
            return True
        return any(
            name == module[-len(name) :] and (len(name) > 1 or path.parent == program.path.parent)
            for path in where.rglob("*.py")
            if path != program.path and path.is_file() and path.stat().st_size <= LARGEST
            for name in imported(path)
        )

    def run(self, program: Program, mutant: str) -> bool:
        """True if something may run the place where a mutant begins to differ."""
        old, new = program.text.splitlines(), mutant.splitlines()
        place = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(old) - 1)
        top = max((i for i in range(min(place, len(old) - 1) + 1) if re.match(r"[^\s#)\]}]", old[i])), default=0)
        end = next((i for i in range(top + 1, len(old)) if re.match(r"[^\s#)\]}]", old[i])), len(old))
        own, rest = "\n".join(old[top:end]), re.sub(r"#.*", "", "\n".join(old[:top] + old[end:]))
        if re.match("if +__name__", own):
            return not re.search(r"torch\.rand", own) or bool(re.search(r"(?i)loader|dataset|parse_args|open\(", own))
        if "__main__" not in program.text and not self.name_module(program):
            return False
        if re.match("def +", own) and _TRIAL.search(own) and not _READS_DATA.search(own):
            return False
        defined = re.match(r"(?:async +)?(?:def|class) +(\w+)", own)
        if defined is None or (top and old[top - 1].startswith("@")) or defined[1] in ("main", "_mp_fn"):
            return True
        used = re.search(rf"\b{defined[1]}\b", rest) or self.mention(program, defined[1])
        return not defined[1].startswith("test_") and bool(used)


def is_ruled_out(kind: Kind, program: Program, top: Path) -> bool:
    """True if the project requires other versions than those in which a kind's change is a mistake."""
    ranges = [RULES[code].versions for code in kind.rules]
    return all(
        any(required(str(program.path.parent), str(top), name).excludes(bounds) for name, bounds in each.items())
        for each in ranges
    )


def _reports_in_tests(rule: type[BaseRule]) -> bool:
    """True for a rule about an interface, and for one that reads configs."""
    return rule.in_tests if issubclass(rule, Rule) else True


def run(folder: Path, which: str, per_kind: int, kinds: Iterable[Kind]) -> Iterator[Outcome]:
    every = programs(folder, which)
    clean: dict[Path, bool] = {}
    alone: dict[tuple[str, str], bool] = {}
    users = Users(folder)
    for each in kinds:
        if all(RULES[code].preview for code in each.rules):
            continue
        count, of, tried = 0, collections.Counter[str](), collections.Counter[str]()
        for program in (one for suffix in each.suffixes for one in every.get(suffix, ())):
            if count >= per_kind:
                break
            if of[program.repository] >= PER_REPOSITORY or not each.fits(program.text):
                continue
            path = program.path.relative_to(folder / program.repository.replace("/", "+")).as_posix()
            if (each.trains and _MEASURES.search(path)) or is_copied_example(program.path):
                continue
            if is_test(path) and not any(_reports_in_tests(RULES[code]) for code in each.rules):
                continue
            if each.alone and words_of(folder, program.repository, each.alone, alone):
                continue
            if each.somewhere and not users.contain(program, each.somewhere):
                continue
            if each.imported and imports(folder, program, each.imported):
                continue
            if is_ruled_out(each, program, folder / program.repository.replace("/", "+")):
                continue
            tried[program.repository] += 1
            if tried[program.repository] > TRIES:
                continue
            try:
                mutant = each.mutate(program.text)
            except (cst.ParserSyntaxError, cst.CSTValidationError, RecursionError):
                continue
            if mutant is None or mutant == program.text:
                continue
            if program.path.suffix == ".py" and not users.run(program, mutant):
                continue
            if program.path not in clean:
                clean[program.path] = not reported(program.path, program.text)
            if clean[program.path]:
                count += 1
                of[program.repository] += 1
                yield Outcome(each.name, program.repository, path, reported(program.path, mutant))
        print(f"{each.name}: {count}", file=sys.stderr, flush=True)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    by_kind: dict[str, Any] = {}
    wanted = {each.name: each.rules for each in KINDS}
    for outcome in outcomes:
        row = by_kind.setdefault(outcome.kind, {"rules": list(wanted[outcome.kind]), "mutants": 0, "found": 0})
        row["mutants"] += 1
        row["found"] += bool(set(outcome.found) & set(wanted[outcome.kind]))
    return by_kind


def record(data: dict[str, Any]) -> None:
    outcomes = [Outcome(*each) for each in data.pop("outcomes")]
    data["programs"] = len({(each.repository, each.path) for each in outcomes})
    data["repositories"] = len({each.repository for each in outcomes})
    data["kinds"] = summary(outcomes)
    wanted = {each.name: each.rules for each in KINDS}
    data["missed"] = [
        [each.kind, each.repository, each.path] for each in outcomes if not set(each.found) & set(wanted[each.kind])
    ]
    RESULTS.write_text(json.dumps({"batches": [*batches(), data]}, indent=1) + "\n", "utf-8")


def batches() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text("utf-8"))["batches"] if RESULTS.exists() else []


def by_lot() -> dict[str, Any]:
    """Return how many mistakes of each lot were found, and how many there are; the same for the headline rules."""
    return {
        batch["half"]: (
            _sums(batch["kinds"].values()),
            _sums(row for row in batch["kinds"].values() if set(corpus.HEADLINE) & set(row["rules"])),
        )
        for batch in batches()
    }


def _sums(rows: Iterable[dict[str, Any]]) -> tuple[int, int]:
    numbers = [(row["found"], row["mutants"]) for row in rows]
    return sum(found for found, _ in numbers), sum(mutants for _, mutants in numbers)


def headline() -> Iterator[str]:
    """Yield a table of the mistakes that the headline rules have to see."""
    latest = batches()[-corpus.LATEST :]
    yield "| mistake | rules | mutants | found | share (95 %) | of the last lots | found | share (95 %) |"
    yield "| --- | --- | --: | --: | --: | --: | --: | --: |"
    names = dict.fromkeys(name for batch in reversed(batches()) for name in batch["kinds"])
    for name in names:
        rows = [batch["kinds"][name] for batch in batches() if name in batch["kinds"]]
        last = [batch["kinds"][name] for batch in latest if name in batch["kinds"]]
        if set(corpus.HEADLINE) & set(rows[-1]["rules"]):
            yield f"| {name} | {', '.join(rows[-1]['rules'])} | {_cells(rows)} | {_cells(last)} |"


def _cells(rows: list[dict[str, Any]]) -> str:
    found, mutants = _sums(rows)
    return f"{mutants} | {found} | {corpus.share(found, mutants) if mutants else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    measure.add_argument("folder", type=Path)
    measure.add_argument("kinds", nargs="*", help="only these kinds")
    measure.add_argument("--half", choices=(*corpus.HALVES, "all"), default="open")
    measure.add_argument("--per-kind", type=int, default=40)
    measure.add_argument("-o", "--output", type=Path, required=True)
    commands.add_parser("record").add_argument("seeded", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        chosen = [each for each in KINDS if not options.kinds or each.name in options.kinds]
        outcomes = list(run(options.folder.resolve(), options.half, options.per_kind, chosen))
        head = {
            "half": options.half,
            "date": datetime.date.today().isoformat(),
            "linter": corpus._git("rev-parse", "HEAD"),
        }
        options.output.write_text(json.dumps({**head, "outcomes": outcomes}, indent=1), "utf-8")
        for name, row in summary(outcomes).items():
            print(f"{name:36} {row['found']:4} of {row['mutants']:4}  {', '.join(row['rules'])}")
    else:
        record(json.loads(options.seeded.read_text("utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
