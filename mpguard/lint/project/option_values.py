"""The values that a project gives to an option, setting or flag, by its name.

All places of a project count: parsers of arguments, assignments and keyword arguments in its code, its configs, and the
commands in scripts and texts. A value that is not a literal may be any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mpguard.lint.source.files import PYTHON
from mpguard.lint.source.strip_comments import stripped

#: The name of an option: a longer one, or one that Python sets, is none.
_NAME = re.compile(r"[^\W\d_]\w{2,63}")
_OFF = frozenset({b"", b"false", b"no", b"off", b"none", b"null", b"0", b"~"})
#: A command that runs a program: a project without one does not say how it is run.
_RUNS = re.compile(rb"\b(?:python[\d.]*|torchrun|accelerate launch|deepspeed)[ \t]+[-\w./$]")
#: A literal of a text, and one of Python: there, a bare name may stand for any value.
_LITERAL = re.compile(rb"[\"'`]*[\w.+-]*[\"'`]*\Z")
_PYTHON_LITERAL = re.compile(rb"(?:[rb]?([\"'])[\w.+-]*\1|True|False|None|-?\d[\w.]*)?\Z")
_DEFAULT = re.compile(rb"\bdefault\s*=\s*([^\s,)]+)")
_TURNED_ON = re.compile(rb"store_false|store_const|append|\bconst\s*=")


def may_be(files: Iterable[tuple[str, bytes]], name: str, value: str | None) -> bool:
    """True if files of a project, with their contents, may give an option a value; None: any value that is true.

    False only if they say how the project is run, define the option, and give it other values everywhere. A config that
    selects another value among several does not define it.
    """
    if not _NAME.fullmatch(name) or (value is not None and not _LITERAL.match(value.encode())):
        return True
    option = _Option(name, value.encode() if value is not None else None)
    defined = is_run = False
    for path, data in files:
        is_code = path.endswith(PYTHON)
        is_run = is_run or (not is_code and _RUNS.search(data) is not None)
        if option.is_mentioned(data):
            given = option.given_in_code(stripped(data)) if is_code else option.given_in_text(data)
            if given:
                return True
            defined = defined or (given is False and (is_code or value is None))
    return not (defined and is_run)


class _Option:
    """An option and the value in question; each method returns None where nothing defines the option."""

    def __init__(self, name: str, value: bytes | None) -> None:
        self._value = value.lower() if value is not None else None
        word = re.escape(name.encode()).replace(b"_", b"[_-]")
        self._word = re.compile(rb"(?<![\w-])-{0,2}%s(?![\w-])" % word)
        self._flag = re.compile(rb"(?<![\w-])--?%s(?![\w-])(?:[ \t=]+|[\"'],\s*)?([^\s\\;,\])]*)" % word)
        # YACS: `train.py --cfg a.yaml AMP_ENABLE True`
        override = rb"\b%s[ \t]+([^\s\\;=:]+)" % re.escape(name.encode()) if name.isupper() else rb"(?!)()"
        self._override = re.compile(override)
        self._parser = re.compile(rb"\b(?:add_argument|option)\(\s*(?:[\"']-\w+[\"'],\s*)?[\"']--?%s[\"']" % word)
        exact = re.escape(name.encode())
        # A field of a dataclass: `fp16: bool = False`
        self._field = re.compile(rb"^[ \t]+%s[ \t]*:[ \t]*[\w.\[\]| ]+=[^\n]*[^\s,)][ \t]*$" % exact, re.M)
        self._assigned = re.compile(
            rb"(?<![\w-])%s(?:[\"']?\]?[ \t]*(?::[ \t]*[\w.\[\]| ]+)?=(?!=)|[\"'][ \t]*:)[ \t]*([^\n]*)" % exact
        )
        # The option itself, by another name: `args.fp16`, `config["fp16"]`, `config.get("fp16", False)`
        self._same = re.compile(
            rb"[\w.]*\b%s\b[ \t]*(?:[,;)].*)?\Z|[\w.]*(?:\[|\.get\(|getattr\(\w[\w.]*,[ \t]*)[\"']%s[\"']"
            % (exact, exact)
        )
        self._configured = re.compile(rb"(?<![\w-])%s[\"']?[ \t]*[:=][ \t]*([^\n]*)" % exact)

    def is_mentioned(self, data: bytes) -> bool:
        """True if content contains the option's name."""
        return self._word.search(data) is not None

    def given_in_text(self, text: bytes) -> bool | None:
        """Return True if a command or config may give the option the value, False if it gives another one."""
        found = [self._is_value(each[1], b"1") for each in self._flag.finditer(text)]
        found += [self._is_value(_first(each[1]), b"?") for each in self._configured.finditer(text)]
        found += [self._is_value(each[1], b"") for each in self._override.finditer(text)]
        return any(found) if found else None

    def given_in_code(self, code: bytes) -> bool | None:
        """Return True if Python code may give the option the value, False if it only defines it with another one."""
        parsers = [_call(code, each.end()) for each in self._parser.finditer(code)]
        if len(re.findall(rb"[\"']" + self._flag.pattern, code)) > len(parsers):
            return True  # a command that the code makes
        defaults = [self._is_default(each) for each in parsers]
        assigned = [each[1] for each in self._assigned.finditer(code)]
        others = [each for each in assigned if not self._same.match(each)]
        given = [self._is_value(_first(each), b"", _PYTHON_LITERAL) for each in others]
        if any(defaults) or any(given):
            return True
        # Others define nothing: a variable is a setting that people edit, a parameter may be passed by its position.
        return False if defaults or self._field.search(code) else None

    def _is_default(self, arguments: bytes) -> bool:
        """True if an argument of a parser may have the value when no command gives it."""
        default = _DEFAULT.search(arguments)
        return _TURNED_ON.search(arguments) is not None or (
            default is not None and self._is_value(default[1], b"", _PYTHON_LITERAL)
        )

    def _is_value(self, text: bytes, empty: bytes, literal: re.Pattern[bytes] = _LITERAL) -> bool:
        """True if a text may be the value; one that is no literal may. empty: what an empty text stands for."""
        value = (text.strip(b"\"'`").lower() or empty) if not text.startswith(b"-") else empty
        if not literal.match(text) or not _LITERAL.match(value):
            return True
        return value not in _OFF if self._value is None else value == self._value


def _first(text: bytes) -> bytes:
    """Return the first value of a line, without what separates it from the next; all of an expression."""
    return re.sub(rb"(?:[ \t]+#.*|[,;)}\]]+\s*.*|\s+)\Z", b"", text.rstrip(), count=1)


def _call(code: bytes, start: int) -> bytes:
    """Return the arguments of a call from a place in them to its end."""
    depth = 1
    for found in re.finditer(rb"[()]", code[start : start + 2000]):
        depth += 1 if found[0] == b"(" else -1
        if not depth:
            return code[start : start + found.start()]
    return code[start : start + 2000]
