"""The private parts of libcst that the linter uses. Each test names the part that is missing or behaves otherwise."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider, WhitespaceInclusivePositionProvider

import mpguard.lint
from mpguard.lint.source import libcst_internals

CODE = '''\
# comment
import torch  # trailing


@torch.compile
def train(model, x: int = (1), *args: int, **options) -> None:
    """Docstring."""
    with (torch.autocast("cuda", dtype=torch.float16), open("a") as file):
        loss = ((model(x, *args)).sum()) ; loss.backward( )
        # a comment in the suite
    if x and not (x): pass
    else:
            y = [i for i in x if (i)] + {**options}["a"][1:2] if f"{x!r:>{y}}" "b" else lambda z: (yield)

class A(B, metaclass=C):
    async def f(self): await (self.g)
    # comment below
'''
PROGRAMS = {"sample": CODE, "an own module": Path(libcst_internals.__file__).read_text("utf-8"), "empty": ""}
BROKEN = "libcst {}: {} differs from what mpguard/lint/source/libcst_internals.py needs"


def broken(part: str) -> str:
    """The message of a failed test."""
    return BROKEN.format(importlib.metadata.version("libcst"), part)


def refused() -> cst.CSTNode:
    """Create a node that libcst refuses to create."""
    return cst.Name("")


# -- the import of libcst ---------------------------------------------------------------------------

IMPORT = """
import mpguard.lint.facts
import dataclasses, pickle, sys
import libcst as cst

CODE = sys.stdin.read()
nodes = [each for each in vars(cst).values() if isinstance(each, type) and issubclass(each, cst.CSTNode)]
concrete = [each for each in nodes if dataclasses.is_dataclass(each) and "__dataclass_params__" in vars(each)]
assert len(concrete) > 150, len(concrete)
for each in concrete:
    assert not each.__dataclass_params__.frozen, each
    for method in ("__eq__", "__hash__", "__repr__"):
        assert getattr(each, method) is getattr(cst.CSTNode, method), (each, method)
assert dataclasses.dataclass.__module__ == "dataclasses"
tree = cst.parse_module(CODE)
assert tree.code == CODE
copy = tree.deep_clone()
assert copy != tree and copy.deep_equals(tree) and pickle.loads(pickle.dumps(tree)).deep_equals(tree)
assert tree.with_changes(body=()).code != CODE and len({tree, copy, tree}) == 2
"""


def test_libcst_that_the_linter_imports_behaves_as_its_own() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], input=CODE, text=True, check=True)


# -- CSTNode.__post_init__ --------------------------------------------------------------------------


def test_node_classes_share_one_post_init() -> None:
    nodes = [each for each in vars(cst).values() if isinstance(each, type) and issubclass(each, cst.CSTNode)]
    own = [each.__name__ for each in nodes if "__post_init__" in vars(each) and each is not cst.CSTNode]
    assert callable(vars(cst.CSTNode).get("__post_init__")), broken("`CSTNode.__post_init__` (missing)")
    assert not own, broken(f"`__post_init__` (defined again by {own})")


def test_post_init_validates() -> None:
    with pytest.raises(cst.CSTValidationError):
        refused()
        pytest.fail(broken("`CSTNode.__post_init__` (does not validate a new node)"))


def test_the_parser_calls_post_init_and_parse_module_replaces_it() -> None:
    with pytest.raises(cst.CSTValidationError):
        cst.parse_module("def f():\n    return.5\n")
        pytest.fail("libcst accepts `return.5` by itself: `parse_module` may not need to turn off validation")
    module = libcst_internals.parse_module("def f():\n    return.5\n")
    assert module.code == "def f():\n    return.5\n", broken("`CSTNode.__post_init__` (the parser does not call it)")


def test_validation_is_back_after_parsing_and_after_an_error() -> None:
    libcst_internals.parse_module("a = 1\n")
    with pytest.raises(cst.CSTValidationError):
        refused()
    with pytest.raises(cst.ParserSyntaxError):
        libcst_internals.parse_module("a = = 1\n")
    with pytest.raises(cst.CSTValidationError):
        refused()


def in_thread(function: Callable[[], object]) -> BaseException | None:
    """Call a function in another thread; return what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_validation_is_off_in_parsing_threads_only_until_the_last_one_ends() -> None:
    with libcst_internals._without_validation():
        with libcst_internals._without_validation():
            refused()
        refused()
        assert isinstance(in_thread(refused), cst.CSTValidationError), "another thread does not validate"
        assert in_thread(lambda: libcst_internals.parse_module("a = 1\n")) is None
        refused()
    assert isinstance(in_thread(refused), cst.CSTValidationError)
    assert not libcst_internals._parsing


# -- frozen nodes -----------------------------------------------------------------------------------


FROZEN = """
import dataclasses
import libcst as cst
from mpguard.lint.source import libcst_internals

module = cst.parse_module("a = 1\\nb = 2\\n")
try:
    module.body = ()
except dataclasses.FrozenInstanceError:
    libcst_internals.set_fields(module, body=module.body[1:])
    assert module.code == "b = 2\\n"
else:
    raise SystemExit("libcst's nodes are not frozen any more: `set_fields` can assign")
"""


def test_fields_of_frozen_nodes_can_be_written_in_place() -> None:
    """They are frozen where libcst was imported before the linter."""
    subprocess.run([sys.executable, "-c", FROZEN], check=True)


# -- CodegenState and CSTNode._codegen --------------------------------------------------------------


def test_codegen_state_has_the_parts_that_are_overridden() -> None:
    try:
        state = importlib.import_module("libcst._nodes.internal").CodegenState
    except (ImportError, AttributeError) as error:
        pytest.fail(broken(f"`libcst._nodes.internal.CodegenState` ({error})"))
    expected = {
        "__init__": ["self", "default_indent", "default_newline"],
        "add_token": ["self", "value"],
        "add_indent_tokens": ["self"],
        "pop_trailing_newline": ["self"],
        "before_codegen": ["self", "node"],
        "after_codegen": ["self", "node"],
        "record_syntactic_position": ["self", "node", "start_node", "end_node"],
    }
    for name, parameters in expected.items():
        method = getattr(state, name, None)
        assert method is not None, broken(f"`CodegenState.{name}` (missing)")
        found = [*inspect.signature(method).parameters]
        assert found[: len(parameters)] == parameters, broken(f"`CodegenState.{name}` (parameters {found})")
    made = state("    ", "\n")
    assert (made.tokens, made.indent_tokens) == ([], []), broken("`CodegenState.tokens` or `.indent_tokens`")
    assert list(inspect.signature(cst.CSTNode._codegen).parameters)[:2] == ["self", "state"], broken("`_codegen`")


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_code_of_a_node_is_that_of_the_public_function(code: str) -> None:
    module = cst.parse_module(code)
    for node in libcst_internals.node_spans(module):
        if isinstance(node, (cst.BaseExpression, cst.BaseStatement)):
            expected = cst.Module([]).code_for_node(node)
            assert libcst_internals.node_code(node) == expected, broken(f"`_codegen` of {type(node).__name__}")


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_positions_are_those_of_the_public_providers(code: str) -> None:
    wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
    spans = libcst_internals.node_spans(wrapper.module)
    starts = [0, *(match.end() for match in re.finditer("\n", code))]
    for provider, first in ((PositionProvider, 0), (WhitespaceInclusivePositionProvider, 2)):
        for node, position in wrapper.resolve(provider).items():
            if isinstance(node, cst.Module):
                continue
            expected = tuple(starts[at.line - 1] + at.column for at in (position.start, position.end))
            part = f"`CodegenState` (the position of {type(node).__name__} by {provider.__name__})"
            assert spans[node][first : first + 2] == expected, broken(part)


# -- one module, one bound --------------------------------------------------------------------------


def test_only_one_module_touches_private_parts() -> None:
    private = re.compile(r"libcst\._|\bcst\._|\._codegen\b|\bCSTNode\.__|(?<!self\.)\b_nodes\.internal")
    writes = re.compile(r"object\.__setattr__")
    folder = Path(mpguard.lint.__file__).parent
    found = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*.py"))
        if private.search(text := path.read_text("utf-8")) or writes.search(text)
    ]
    assert found == ["source/libcst_internals.py"]


def test_the_bound_allows_one_minor_release() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8")
    (requirement,) = re.findall(r'"libcst([^"]*)"', text)
    assert requirement == ">=1.9,<1.10", "run this file with the new release before the bound is raised"
    installed = tuple(map(int, importlib.metadata.version("libcst").split(".")[:2]))
    assert (1, 9) <= installed < (1, 10)
