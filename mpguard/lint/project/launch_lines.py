"""Launch lines: the commands in shell scripts, Makefiles, workflows and READMEs that start a training script.

    CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file fsdp.yaml \\
        train.py --lr 1e-4

They connect a script to its config, and have typical mistakes in the place of the config. A word with a
variable in it is unknown, and nothing is concluded from an unknown word; only the name of a config may come from a
variable that the file sets once, to a literal.
"""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH118

from __future__ import annotations

import codecs
import collections
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.text_edits import Span
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.project import tree
from mpguard.lint.source.files import MARKDOWN, kind_of

Launcher = Literal["accelerate", "deepspeed", "torchrun", "mpguard"]

#: A file with a launch line contains one of these; most files are decided by this search alone.
GATE = (b"accelerate", b"deepspeed", b"torchrun", b"torch.distributed", b"mpguard launch")
#: The size in bytes above which a file is data or a log.
LARGEST = 512 << 10

#: Options without a value (accelerate 1.15.0, torch 2.13, DeepSpeed 0.19); a test compares them with the parsers.
_ACCELERATE_SWITCHES = frozenset({
    "cpu", "debug", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation",
    "enable_cpu_affinity", "fp8_use_autocast_during_eval", "help", "module", "multi_gpu", "no_python",
    "no_tpu_cluster", "quiet", "same_network", "tpu", "tpu_cluster", "tpu_use_sudo", "use_deepspeed", "use_fsdp",
    "use_megatron_lm", "use_parallelism_config", "h", "m", "q",
})  # fmt: skip
SWITCHES = {
    "accelerate": _ACCELERATE_SWITCHES,
    "mpguard": _ACCELERATE_SWITCHES,
    "torchrun": frozenset({
        "help", "module", "no_python", "run_path", "standalone", "virtual_local_rank", "use_env", "h", "m",
    }),
    "deepspeed": frozenset({
        "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
        "bind_cores_to_rank", "quiet", "help", "q", "h",
    }),
}  # fmt: skip

_PYTHON = r"(?:[\w./-]*/)?python[\d.]*[ \t]+-m[ \t]+"
_COMMAND = lazy_pattern(
    r"(?<![\w./-])(?:"
    r"(?P<accelerate>accelerate[ \t]+launch|accelerate-launch"
    rf"|{_PYTHON}accelerate\.commands\.(?:launch|accelerate_cli[ \t]+launch))"
    r"|(?P<mpguard>mpguard[ \t]+launch)"
    rf"|(?P<torchrun>torchrun|{_PYTHON}torch\.distributed\.(?:run|launch))"
    rf"|(?P<deepspeed>deepspeed|{_PYTHON}deepspeed(?:\.launcher\.runner)?))"
    r"(?=[ \t]|\\\r?\n)"
)
_SPACE = lazy_pattern(r"(?:[ \t]|\\\r?\n)*")
#: A word of a shell command, in pieces: quoted, escaped, a variable or substitution, plain.
_PIECE = lazy_pattern(
    r"'(?P<single>[^'\n]*)'|\"(?P<double>(?:[^\"\\\n]|\\.)*)\"|\\(?P<escaped>[^\r\n])"
    r"|(?P<unknown>\$\{\{[^}\n]*\}\}|\$\{[^}\n]*\}|\$\([^)\n]*\)|\$\w+|\$[@*#?]|<[\w -]+>|\{[^}\s]*\}|\*|\[[A-Z_]+\])"
    r"|(?P<plain>[^\s'\"\\$;|&<>()`{*\[#]+|(?<=\S)[#\[{])"
)
#: An assignment to a variable, and one of a literal that no condition guards.
_SETS = lazy_pattern(r"^[ \t]*(?:export[ \t]+)?(\w+)=", re.M)
_LITERAL = lazy_pattern(
    r"^(?:export[ \t]+)?(?P<name>\w+)=(?:\"(?P<double>[^\"$`\\\n]*)\"|'(?P<single>[^'\n]*)'|(?P<plain>[\w./~:@%+,-]+))"
    r"[ \t]*(?:;|#.*)?$",
    re.M,
)
_VARIABLE = lazy_pattern(r"\$(?:\{(\w+)\}|(\w+))")


@dataclasses.dataclass(frozen=True)
class Word:
    """A word of a command, with its place in the file.

    text: None if it contains a variable. expanded: the same with the variables that the file sets once, to a literal.
    """

    text: str | None
    span: Span
    expanded: str | None = None

    @property
    def resolved(self) -> str | None:
        """The text, with its variables replaced if they are known."""
        return self.text if self.text is not None else self.expanded


@dataclasses.dataclass(frozen=True)
class Launch:
    """One command that launches a script.

    path: the file of the line. start: the end of the launcher's own words. options: the options before the
    script, by name without dashes, `-` as `_`; a switch has no word. script: None if a variable hides it.
    module: the script is a module's name. arguments: the script's arguments. hidden: a variable before the
    script may contain options.
    """

    path: str
    launcher: Launcher
    span: Span
    start: int
    options: dict[str, Word | None]
    script: Word | None
    module: bool
    arguments: tuple[Word, ...]
    hidden: bool

    def argument(self, *names: str) -> tuple[Word, Word] | None:
        """Return an option of the script, by its names with dashes, with its value; `--config=x` is one word."""
        for place, word in enumerate(self.arguments):
            if word.text is None:
                continue
            name, equals, value = word.text.partition("=")
            if name not in names:
                continue
            if equals:
                return word, Word(value, word.span)
            if place + 1 < len(self.arguments):
                return word, self.arguments[place + 1]
        return None


def may_hold(data: bytes) -> bool:
    """True if a file may contain a launch line, by its bytes."""
    return any(token in data for token in GATE)


def read(data: bytes, path: str) -> list[Launch]:
    """Return the launch lines of a file's content that start a Python script or module."""
    if len(data) > LARGEST or not may_hold(data):
        return []
    text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    return [launch for launch in _launches(text, path) if launch.script is None or _is_python(launch)]


def _is_python(launch: Launch) -> bool:
    """True if a line starts a script by its name: in prose, any word may follow (`accelerate launch to start`)."""
    assert launch.script is not None
    name = launch.script.text
    return name is None or name.endswith(".py") or (launch.module and re.fullmatch(r"[\w.]+", name) is not None)


def _launches(text: str, path: str) -> Iterator[Launch]:
    variables: dict[str, str] | None = None
    for found in _COMMAND.finditer(text):
        variables = _variables(text) if variables is None else variables
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if line.lstrip().startswith(("#", "//", "REM ")) or re.search(r"(?:^|\s)(?:pip3?|conda|import|from)\s", line):
            continue
        launcher: Launcher = next(name for name in ("accelerate", "mpguard", "torchrun", "deepspeed") if found[name])
        quote = line[-1:] if line[-1:] in ("`", "'", '"') else ""
        words = list(_words(text, found.end(), quote, variables))
        options, place, hidden, module = _options(words, launcher)
        script = words[place] if place is not None else None
        after = tuple(words[place + 1 :]) if place is not None else ()
        if script is None and not hidden:
            continue
        end = words[-1].span[1] if words else found.end()
        yield Launch(path, launcher, (found.start(), end), found.end(), options, script, module, after, hidden)


def _options(words: list[Word], launcher: Launcher) -> tuple[dict[str, Word | None], int | None, bool, bool]:
    """Return the options, the script's index (None if unknown), True if a variable may hide options, and `-m`."""
    options: dict[str, Word | None] = {}
    place, hidden, module = 0, False, False
    while place < len(words):
        word = words[place]
        if word.text is None:
            hidden = True
            if any(each.text is not None and each.text.endswith(".py") for each in words[place + 1 :]):
                place += 1
                continue
            return options, None, True, module
        if not word.text.startswith("-"):
            return options, place, hidden, module
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        place += 1
        if equals:
            options[name] = Word(value, word.span)
        elif name in SWITCHES[launcher]:
            options[name] = None
            module = module or name in ("m", "module")
        elif place < len(words):
            options[name] = words[place]
            place += 1
    return options, None, hidden, module


def _variables(text: str) -> dict[str, str]:
    """Return the variables that a script sets once, unconditionally and to a literal."""
    often = collections.Counter(found[1] for found in _SETS.finditer(text))
    return {
        found["name"]: found["double"] or found["single"] or found["plain"] or ""
        for found in _LITERAL.finditer(text)
        if often[found["name"]] == 1
    }


def _words(text: str, place: int, quote: str, variables: Mapping[str, str]) -> Iterator[Word]:
    """Yield the words of a command up to its end: of the line, or at an operator, a comment, the quotes around it."""
    while True:
        place = start = _end(_SPACE, text, place)
        parts: list[str] = []
        known = True
        while (piece := _PIECE.match(text, place)) is not None:
            if quote and text.startswith(quote, place):
                break
            if piece.lastgroup == "unknown":
                known = False
            elif piece.lastgroup == "double":
                inside = piece["double"]
                known = known and "$" not in inside and "`" not in inside
                parts.append(re.sub(r"\\(.)", r"\1", inside))
            else:
                parts.append(piece[piece.lastgroup or 0])
            place = piece.end()
        if place == start:
            return
        expanded = None if known else _expanded(text[start:place], variables)
        yield Word("".join(parts) if known else None, (start, place), expanded)


def _expanded(word: str, variables: Mapping[str, str]) -> str | None:
    """Return a word with its variables replaced; None if one is unknown, or where something else is expanded."""
    names = [found[1] or found[2] for found in _VARIABLE.finditer(word)]
    plain = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), word).strip('"')
    return plain if not set(names) - variables.keys() and re.fullmatch(r"[\w./~:@%+=,-]+", plain) else None


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


# -- in a tree --------------------------------------------------------------------------------------

#: The most files of a tree whose names are tested, and that are read, for launch lines.
MOST_FILES, MOST_READ = 20_000, 1_000


def located(name: str, path: str, top: Path) -> Path | None:
    """Return the file that a command in a file names: from its own folder, or one above it, up to the tree's top.

    The folder that the command runs in is unknown.
    """
    folder = Path(path).absolute().parent
    for base in (folder, *folder.parents):
        candidate = base / name
        if tracked_fs.is_file(candidate):
            return candidate
        if base == top:
            break
    return None


@cached_per_run
def in_tree(top: Path) -> Mapping[str, tuple[Launch, ...]]:
    """Return real path of a script -> the lines of its tree that launch it; empty for a tree that is too large."""
    found: dict[str, list[Launch]] = {}
    files = _launch_files(str(top))
    tracked_fs.record("launch files", str(top), tracked_fs.names_digest(files))
    for path in files:
        try:
            launches = read(tracked_fs.read_up_to(path, LARGEST) or b"", path)
        except OSError:
            continue
        for launch in launches:
            script = _script(launch, top)
            if script is not None:
                found.setdefault(tracked_fs.real_path(script), []).append(launch)
    return {script: tuple(launches) for script, launches in found.items()}


@cached_per_run
def given_in_tree(top: Path) -> Mapping[str, tuple[Launch, ...]]:
    """Return real path of a Python file -> the lines of its tree that give it to another script, as its config."""
    found: dict[str, list[Launch]] = {}
    for launch in (each for launches in in_tree(top).values() for each in launches):
        for word in launch.arguments:
            file = located(word.text, launch.path, top) if word.text and word.text.endswith(".py") else None
            if file is not None:
                found.setdefault(tracked_fs.real_path(file), []).append(launch)
    return {file: tuple(launches) for file, launches in found.items()}


def files_seen(top: str) -> str:
    """Return the digest of the names of a tree's files that may contain launch lines."""
    return tracked_fs.names_digest(_launch_files(top))


def _launch_files(top: str) -> list[str]:
    """Return the files of a tree that may contain launch lines, by their names; none of a tree that is too large."""
    found: list[str] = []
    left = MOST_FILES
    for folder, files in tree.walk(top, hidden=(".github",)):
        left -= len(files)
        for file in files:
            if file.endswith(".py"):
                continue
            path = os.path.join(folder, file)
            if kind_of(path) != "launch" or (file.lower().endswith(MARKDOWN) and not file.lower().startswith("readme")):
                continue
            if left < 0 or len(found) == MOST_READ:
                return []
            found.append(path)
    return found


def _script(launch: Launch, top: Path) -> Path | None:
    """Return the file of the script, or module, that a line launches."""
    name = launch.script.text if launch.script is not None else None
    if name is None:
        return None
    if not launch.module:
        return located(name, launch.path, top)
    inner = name.replace(".", "/")
    places = (f"{inner}.py", f"{inner}/__main__.py", f"src/{inner}.py", f"src/{inner}/__main__.py")
    return next((found for each in places if (found := located(each, launch.path, top)) is not None), None)
