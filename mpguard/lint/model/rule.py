"""The base classes of rules, and the plain data that they yield.

One rule is one file in `mpguard/lint/rules/` (Python) or `mpguard/lint/rules/config/` (YAML, JSON):
a class with a docstring (its manual page), a code, a name, a severity, a message, triggers and
examples. Importing the file registers it; there is no other list.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from mpguard.core.errors import ExtensionError
from mpguard.core.text_edits import Edit, Span

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.facts.behaviour.trace_steps import StepKind, Trace
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.project.launch_lines import Launch
    from mpguard.lint.project.project import Project

Severity = Literal["error", "warning", "info"]
Applicability = Literal["safe", "unsafe"]


@dataclasses.dataclass(frozen=True)
class Fix:
    """Edits of one file that fix one finding.

    title: what the fix does, in the imperative ("Step through the scaler").
    """

    title: str
    applicability: Applicability
    edits: tuple[Edit, ...]


@dataclasses.dataclass(frozen=True)
class Note:
    """A second place, or a remark without one. path: the file of the place; None is the finding's own."""

    message: str
    span: Span | None = None
    path: str | None = None


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """What a rule yields: offsets in one file's text (code points), no syntax-tree node.

    The engine turns it into a `Finding` with path, lines and columns. severity: only where it differs from the rule's.
    versions, yields_to: see `BaseRule`.
    """

    code: str
    span: Span
    message: str
    help: str = ""
    notes: tuple[Note, ...] = ()
    fix: Fix | None = None
    severity: Severity | None = None
    versions: tuple[tuple[str, str], ...] = ()
    yields_to: tuple[str, ...] = ()


class HasSpan(Protocol):
    """Anything that has a place in a file: an event, a value, a config node."""

    @property
    def span(self) -> Span: ...


def any_of(*tokens: bytes) -> tuple[bytes, ...]:
    """Return one condition of `triggers`: the file contains at least one of the tokens."""
    return tokens


@dataclasses.dataclass(frozen=True)
class Example:
    """Code of a rule's page, and its test. `# !` at the end of a line marks a reported one.

    files: other files that the example needs in its folder (a config, a module), name -> content.
    name: the example's file name; config rules name a `.yaml` or `.json`.
    """

    code: str
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Good(Example):
    """Code that the rule does not report."""


@dataclasses.dataclass(frozen=True)
class Bad(Example):
    """Code that the rule reports. fixed: the code after all fixes (without markers), which the rule does not report."""

    fixed: str | None = None


class BaseRule:
    """The attributes and methods that all kinds of rules have."""

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    message: ClassVar[str]
    help: ClassVar[str] = ""
    #: True: off unless selected by its full code, or by a prefix or ALL with --preview.
    preview: ClassVar[bool] = False
    #: A conjunction of `any_of(...)`: necessary conditions on a file's bytes. Empty: always.
    triggers: ClassVar[tuple[tuple[bytes, ...], ...]] = ()
    #: Further conditions, each of which another module of the same program may meet instead: see `Project.nearby`.
    triggers_nearby: ClassVar[tuple[tuple[bytes, ...], ...]] = ()
    #: One more necessary condition, on the code without comments: for tokens that are common in harmless forms.
    pattern: ClassVar[re.Pattern[bytes] | None] = None
    #: Codes of rules that take precedence where both report the same expression; its own: that of its other forms.
    yields_to: ClassVar[tuple[str, ...]] = ()
    #: The versions of libraries for which the findings are true: `{"torch": ">=2.4"}`, `{"accelerate": ">=1.0,<2"}`.
    #: Nothing is reported in a project whose requirements, or calls of what was removed before, exclude them.
    versions: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[tuple[Example, ...]] = ()
    #: True if its findings have fixes. A rule whose example has `fixed` need not say so.
    fixes: ClassVar[bool] = False

    def __init_subclass__(cls, kind: bool = False, form_of: str | None = None, **kwargs: Any) -> None:
        """Register a rule, or a form of one.

        kind: the class is a kind of rule, and not a rule itself. form_of: the code of the rule that it is a form of.
        """
        super().__init_subclass__(**kwargs)
        if form_of is not None:
            cls.code = form_of
            _FORMS.setdefault(form_of, {})[cls.__module__] = cls
        elif not kind:
            _register(cls)

    @classmethod
    def forms(cls) -> tuple[type[BaseRule], ...]:
        """Return the other forms of the mistake that a rule reports: each is a class with a `check` of its own.

        A form has the code, the page and the severity (unless it has its own) of its rule; its docstring is a row of
        the page's table, a sentence and why.
        """
        return tuple(form for _, form in sorted(_FORMS.get(cls.code, {}).items()) if form is not cls)

    def at(
        self,
        place: HasSpan | Span,
        *,
        notes: tuple[Note, ...] = (),
        fix: Fix | None = None,
        help: str | None = None,
        message: str | None = None,
        severity: Severity | None = None,
        versions: Mapping[str, str] | None = None,
        **values: Any,
    ) -> Diagnostic:
        """Return a diagnostic at a place, with `values` filled into the message.

        versions: those of this finding, where they differ from the rule's.
        """
        span = place if isinstance(place, tuple) else place.span
        text = (message or self.message).format(**values) if values else (message or self.message)
        shown = self.help if help is None else help
        about = tuple((self.versions if versions is None else versions).items())
        grade = severity or getattr(self, "severity", None)
        return Diagnostic(self.code, span, text, shown, notes, fix, grade, about, self.yields_to)

    @classmethod
    def page(cls) -> str:
        """Return the manual page as Markdown, without its heading: the docstring of the class."""
        return inspect.getdoc(cls) or ""

    @classmethod
    def fixable(cls) -> bool:
        """True if the rule, or one of its forms, has a fix."""
        shown = any(isinstance(example, Bad) and example.fixed is not None for example in cls.examples)
        return shown or any(each.fixes for each in (cls, *cls.forms()))


class Rule(BaseRule, kind=True):
    """A rule about Python code. needs_config: it reports nothing in a file without launch configs.

    in_tests: it reports tests and benchmarks too, because it is about an interface (removed, deprecated, raising). By
    default it is about what a training loses, and a loop that tests or measures something loses nothing.
    """

    needs_config: ClassVar[bool] = False
    in_tests: ClassVar[bool] = False

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        raise NotImplementedError


class ScalingRule(Rule, kind=True):
    """A rule about one operation of the loss scaling protocol: `facts/behaviour/trace.py` has the traces.

    operations: the kinds of the operations that may be wrong. `misuse` returns the finding if the operation at a place
    of a trace is one; an operation that several traces contain is reported once.
    across: operations in functions of other modules may be wrong, too; they are reported at the call.
    """

    operations: ClassVar[tuple[StepKind, ...]]
    across: ClassVar[bool] = False

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        raise NotImplementedError

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        reported: set[Span] = set()
        for trace in facts.traces.all:
            for place, step in enumerate(trace):
                if step.kind not in self.operations or step.span in reported or not (step.at is None or self.across):
                    continue
                found = self.misuse(trace, place, facts)
                if found is not None and found.span not in reported:
                    reported.add(found.span)
                    yield found


class ConfigRule(BaseRule, kind=True):
    """A rule about a config: a file, or a DeepSpeed config that is a dict in Python code.

    kinds: the kinds that it reads (`accelerate`, `deepspeed`, `axolotl`, `llamafactory`). project: its surroundings.
    """

    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, project: Project) -> None:
        self.project = project

    def check(self, document: Document) -> Iterator[Diagnostic]:
        raise NotImplementedError


class LaunchRule(BaseRule, kind=True):
    """A rule about the launch lines of a shell script, Makefile, workflow or README. project: its surroundings."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def check(self, launches: list[Launch]) -> Iterator[Diagnostic]:
        raise NotImplementedError


class EngineRule(BaseRule, kind=True):
    """A finding of the engine itself: files that cannot be read, suppressions. It has a page, but no `check`."""


_RULES: dict[str, type[BaseRule]] = {}
#: Code of a rule -> module -> form.
_FORMS: dict[str, dict[str, type[BaseRule]]] = {}


def _register(rule: type[BaseRule]) -> None:
    missing = [name for name in ("code", "name", "severity", "message") if not hasattr(rule, name)]
    if missing:
        raise ExtensionError(f"{rule.__module__}.{rule.__qualname__}: a rule needs `{missing[0]}`")
    other = _RULES.get(rule.code)
    if other is not None and (other.__module__, other.__qualname__) != (rule.__module__, rule.__qualname__):
        raise ExtensionError(f"{rule.__module__}: code {rule.code} is taken by {other.__module__}")
    _RULES[rule.code] = rule


def rules(own_only: bool = False) -> dict[str, type[BaseRule]]:
    """Return all rules by code, loaded through the entry point `mpguard.rules`."""
    from mpguard.core import entry_points

    entry_points.load("mpguard.rules", own_only)
    return dict(sorted(_RULES.items()))
