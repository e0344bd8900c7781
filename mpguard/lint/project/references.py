"""References to a file's functions and classes from the other files of its project.

A definition that nothing refers to does not run. Every file of the project counts: Python code, in which imports are
resolved, and strings; notebooks, configs, shell scripts, the code in Markdown, and other text. What cannot be resolved
counts as a reference.
"""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH119, PTH120

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.project import summaries, tree, tree_state
from mpguard.lint.source.files import MARKDOWN, NOTEBOOK, PYTHON
from mpguard.lint.source.strip_comments import stripped
from mpguard.lint.source.test_paths import is_test, is_unit_test

#: The size in bytes above which a file that is not Python is data or a log.
LARGEST = 512 << 10
#: What Markdown has of commands and code: blocks, indented or fenced, and spans.
_MARKDOWN_CODE = lazy_pattern(rb"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]+`|^(?: {4}|\t)[^\n]*", re.DOTALL | re.M)
#: Code that may get a class by a name that comes from outside.
_BY_NAME = lazy_pattern(rb"\bimport_module\b|\b__import__\b|\b__subclasses__\b|\bpydoc\.locate\b|\bglobals\(\)")
#: The same, and more ways to get a function or a class that no code names.
_DYNAMIC = lazy_pattern(
    _BY_NAME.pattern + rb"|\b__(?:init_)?subclass(?:es)?__|\b__dict__\b|\b__bases__\b|\bmetaclass[ \t]*="
    rb"|\blocate\(|\b(?:globals|locals|vars)\(|\b(?:methodcaller|attrgetter)\("
    rb"|\bgetattr\([^,]{0,200},\s*(?![\s\"'])|\bgetattr\([^,]{0,200},\s*[\"'][^\"']*[\"']\s*[^\s,)]"
    rb"|\bgetmembers\b|\brun_(?:path|module)\b|\b\w*(?:Fire|CLI)\(|(?<![\w.])(?:eval|exec)\(|\bsys\.modules\b"
    rb"|\binstantiate\(|\bimport[ \t]*\*"
)
#: Functions that a launcher calls by their names.
ENTRIES = frozenset({"main", "_mp_fn"})
#: Modules that tools import by their names.
BY_TOOLS = frozenset({"__init__", "__main__", "conftest", "hubconf", "setup", "sitecustomize", "usercustomize"})
#: Where a top-level statement begins: with its decorators, and without lines that close a bracket.
_STATEMENT = lazy_pattern(rb"\n(?=[^\s)\]}#])(?<!\\\n)")
_HEADER = lazy_pattern(
    rb"(?:async[ \t]+)?(?:def|class)[ \t]+\w+[ \t]*(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))?[^:\n]*:"
)
_DEFINED = lazy_pattern(rb"(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)")
#: Code, commands or requirements of what reads a DeepSpeed config, or may read one.
_READS_DEEPSPEED = lazy_pattern(
    rb"deepspeed\.init|\binitialize\(|DeepSpeed(?:Plugin|Strategy|Engine)|HfArgumentParser|TrainingArguments"
    rb"|Trainer\(|(?i:accelerat|lightning)"
)
_DISTRIBUTED = lazy_pattern(rb"^distributed_type[ \t]*:[ \t]*[\"']?(\w+)", re.M)
#: Code or commands that read a DeepSpeed config with `json`.
_READS_AS_JSON = lazy_pattern(
    rb"HfArgumentParser|TrainingArguments|Trainer\(|[Aa]ccelerator\(|accelerate launch|[Ll]ightning"
    rb"|json\.loads?\([^\n]*(?i:deepspeed|ds_?conf|zero)"
)
#: A command that gives a config to DeepSpeed's own reader.
_GIVES_DEEPSPEED = lazy_pattern(rb"--deepspeed_config(?![\w-])")
#: `deepy.py` is the launcher of GPT-NeoX, and `NeoXArgs` reads its configs, of which DeepSpeed gets a part.
_NAMES_DEEPSPEED = lazy_pattern(
    rb"(?i)deepspeed|HfArgumentParser|TrainingArguments|accelerat|lightning|neox_?arg|deepy\.py"
)
#: `update()` of anything but a progress bar or an average.
_UPDATE = lazy_pattern(
    rb"(?i)(?<![\w.])(?![\w.]*(?:bar|progress|tqdm|ema)\w*\s*\.\s*update\b)(?P<object>[\w.]*[\w\])])"
    rb"\s*\.\s*update\(\s*(?:\)|new_scale)"
)
_IS_SCALER = lazy_pattern(rb"(?i)^class[ \t]+\w+\([^)]*scaler", re.M)
_STEPS_SCALER = lazy_pattern(rb"(?i)scaler\w*\.step\(")
_SCALER, _OWN_SCALER = lazy_pattern(rb"(?i)scaler"), lazy_pattern(rb"(?:Grad|Loss)Scaler\(")
#: What may compile a model: code, options of launchers and of Trainers, and texts that name them.
_COMPILE = lazy_pattern(rb"(?<!\bre)(?<!\bregex)\.compile\b|\bimport compile\b|(?i:torch_?compile|dynamo|inductor)")
#: Settings by which setuptools builds what has an `__init__.py` in each folder; pyproject.toml's `find` takes more.
_FINDS_PACKAGES = lazy_pattern(rb"(?<!\w)find_packages\(|^packages[ \t]*=[ \t]*find:", re.M)
_BUILD_FILES = ("setup.py", "setup.cfg", "pyproject.toml")
#: The tables of a pyproject.toml with which a package is built.
_BUILDS = lazy_pattern(rb"^\[(?:project|build-system|tool\.poetry)\]", re.M)
#: A line of a YAML or TOML that asks for low precision: indentation, key, value.
_PRECISION_KEY = lazy_pattern(
    rb"^([ \t]*)[\"']?((?:use_|enable_)?(?:mixed_precision|fp16|bf16|fp8|amp|allow_tf32|tf32|float32_matmul_precision"
    rb"|(?:amp|autocast|compute|train|training|mixed|torch|model)_(?:dtype|precision)))[\"']?[ \t]*[:=][ \t]*"
    rb"[\"']?(?:true|fp16|bf16|fp8|float16|bfloat16|half|16|16-mixed|bf16-mixed|high|medium)\b",
    re.M | re.I,
)
#: Code that hands on a config, or a part of it, without naming its keys.
_EXPANDS = lazy_pattern(
    rb"\binstantiate\b|\bLightningCLI\b|HfArgumentParser|TrlParser|\bfrom_dict\(|\bsetattr\(|\bfrom_config\("
    rb"|\*\*\s*[\w.]*(?:arg|opt|conf|cfg|param|flag|setting|hp)\w*\s*[,)}]"
)
#: What only configs of other programs have: accelerate, axolotl, LLaMA-Factory, Lightning's command line, Hydra.
_OF_OTHERS = lazy_pattern(
    rb"^[ \t]*(?:compute_environment|distributed_type|base_model|finetuning_type|class_path|_target_|zero_optimization)"
    rb"[ \t]*:",
    re.M,
)
#: Code that hands on the options of a program as a whole, other than to a log; what reads them there is unknown.
_LOGGED = lazy_pattern(
    rb"(?:json\.dumps?|yaml\.\w*dump|print|pprint|wandb\.init|init_trackers|info|log_params|add_text|write)"
    rb"\((?:[^()\n]|\([^()\n]*\))*?(?:vars\(\w+\)|\w+\.__dict__)"
)
_HANDED_ON = lazy_pattern(
    rb"\bvars\(|\.__dict__|_get_kwargs|\basdict\(|from_argparse_args|add_argparse_args|save_hyperparameters"
    rb"|\*\*\s*\w*(?:arg|opt|conf|cfg|param|flag)\w*\s*[,)}]|\bgetattr\(\s*[\w.]+\s*,\s*[^\"'\s]"
    rb"|\b(?:OmegaConf|EasyDict|Munch|megatron|fairseq)\b|\blocals\(\)"
)
#: What a config or a command of accelerate has: it reads `mixed_precision` itself.
_ACCELERATE = lazy_pattern(rb"\b(?:compute_environment|distributed_type|accelerate)\b")
_ADDED_OPTION = lazy_pattern(rb"(?:\bchoices|\bdefault|\bhelp)\s*=\s*(?:\[[^\]]*\]|\([^)]*\)|[\"'][^\"'\n]*[\"'])")
#: Values of an option that ask for no low precision.
_FULL = rb"(?:no|none|fp32|float32|float|32|full|false|0|highest)\b"
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
#: Folders of a project's examples.
_EXAMPLES = frozenset({"example", "examples", "research_projects"})


def may_use(top: Path, file: Path, name: str) -> bool:
    """True if another file of a project may use a top-level name of a file; without a name, the file itself.

    Tests do not count.
    """
    return _asked(top, file, _is_used, name)


def users(top: Path, file: Path, name: str) -> list[str] | None:
    """Return the other files of a project that may use a top-level name of a file; None if it is too large to search.

    Those that only mention the name, as a config or a README, are among them.
    """
    found = _answered(top, file, _where_used, name)
    return found if isinstance(found, list) else None


def may_derive(top: Path, file: Path, name: str) -> bool:
    """True if a class of another file of a project may derive from a class of a file."""
    return _asked(top, file, _is_base, name)


def may_read_deepspeed_as_json(top: Path, file: Path) -> bool:
    """True if something in a project may read a DeepSpeed config with `json`, as Trainer, accelerate and Lightning do.

    DeepSpeed itself reads it with hjson, which accepts more: what commands give to `--deepspeed_config`.
    """
    return _asked(top, file, _reads_deepspeed_as_json)


def configs_choose_deepspeed(top: Path) -> bool:
    """True if a project has accelerate configs, and all of them choose DeepSpeed."""
    return _asked(top, "", _chooses_deepspeed)


def may_look_up(top: Path) -> bool:
    """True if code of a project may get a class by a name that is not in the code."""
    return _asked(top, "", _looks_up)


def may_read_deepspeed(top: Path, file: Path) -> bool:
    """True if something in a project may read the DeepSpeed config that a file is, or contains."""
    return _asked(top, file, _reads_deepspeed)


def may_ask_for(top: Path, word: str) -> bool:
    """True if a script, config or text of a project contains a word, in lower or upper case: code does not count."""
    return _asked(top, "", _asks_for, word)


def may_call(top: Path, file: Path, name: str) -> bool:
    """True if another file of a project may use a method of a class of a file, by its name."""
    return _asked(top, file, _calls, name)


def may_set(top: Path, file: Path, name: str) -> bool:
    """True if another file of a project may set an attribute of this name, of any object."""
    return _asked(top, file, _sets, name)


def may_set_from_outside(top: Path, file: Path, name: str) -> bool:
    """True if a file that uses another one assigns to an attribute of this name, of an object other than `self`."""
    return _asked(top, file, _sets_from_outside, name)


def may_mention(top: Path, file: Path, name: str, folder: Path) -> bool:
    """True if code below a folder, other than a file's, contains a name."""
    return _asked(top, file, _is_mentioned_below, f"{name} {folder}")


def may_give(top: Path, file: Path, name: str) -> bool:
    """True if another file of a project gives something a keyword argument or an item of this name."""
    return _asked(top, file, _gives_keyword, name)


def is_replaced(top: Path, file: Path, name: str) -> bool:
    """True if another file that imports a module has its own definition of a function of this name."""
    return _asked(top, file, _replaces, name)


def may_update_scaler(top: Path, file: Path) -> bool:
    """True if other code of a project may update a GradScaler that a file steps with.

    A program with a scaler of its own, which does not use the file, updates that one; and code that steps a scaler, and
    is connected with the file by no import, the one that it steps.
    """
    return _asked(top, file, _updates_scaler)


def may_read_option(top: Path, name: str) -> bool:
    """True if code of a project may read an option, as an attribute or an item, or hands on all options at once."""
    return _asked(top, "", _reads_any, name)


def passes_option(top: Path, name: str) -> bool:
    """True if a script, config or text of a project passes an option, with a value that asks for low precision."""
    return _asked(top, "", _passes, name)


def gives_option(top: Path, name: str, value: str) -> bool:
    """True if a config or script of a project gives an option this value, in a file that is not accelerate's."""
    return _asked(top, "", _gives, f"{name} {value}")


def may_handle_value(top: Path, value: str) -> bool:
    """True if code of a project contains a string, other than among the choices or as the default of an option."""
    return _asked(top, "", _names_value, value)


def may_read_deepspeed_key(top: Path, config: Path, key: str) -> bool:
    """True if code of a project reads a key of a DeepSpeed config itself: `ds_config.get("precision")`.

    In code that names the file, from any object.
    """
    return _asked(top, config, _reads_deepspeed_key, key)


def unread_keys(top: Path, file: Path) -> list[tuple[str, str]]:
    """Return the configs (YAML, TOML) of a project with a key for low precision that its code nowhere names.

    Each with the key. Only configs that a file names; none if code may read keys without naming them.
    """
    found = _answered(top, file, _lists_unread_keys)
    pairs = [each.rpartition(":") for each in found] if isinstance(found, list) else []
    return [(config, key) for config, _, key in pairs]


def may_compile(top: Path) -> bool:
    """True if something in a project may compile a model."""
    return _asked(top, "", _compiles)


def is_all_code(top: Path, file: Path) -> bool:
    """True if a file is the only Python file of a project, which has no notebook either."""
    return _asked(top, file, _is_alone)


def is_copied_example(file: Path) -> bool:
    """True if a file is an example of another package, of which its project contains a copy, and does not run it."""
    above = list(file.parents)
    place = next((place for place, folder in enumerate(above) if folder.name in _EXAMPLES), None)
    if place is None:
        return False
    for folder in above[place + 1 :]:
        top = next((each for each in folder.parents if tree.is_project(each)), None)
        if top is not None and _is_copy(folder, top):
            return not _asked(top, file, _is_run)
    return False


def is_in_copy(file: Path, top: Path, by_terms: bool = False) -> bool:
    """True if a file is in a copy of another package below the top of a project.

    by_terms: with another kind of license; else one of another holder is enough, which a part of the project may have.
    """
    inner = (each for each in file.parents if each.is_relative_to(top) and each != top)
    return any(_is_copy(each, top) and not (by_terms and _terms(each) == _terms(top)) for each in inner)


def _is_copy(folder: Path, top: Path) -> bool:
    """True if a folder contains a package with another license than its project.

    The project's own package, in a folder such as `python`, may repeat its license.
    """
    own = _license(folder)
    return own is not None and is_installable(folder) and own != _license(top)


def _terms(folder: Path) -> list[bytes]:
    """Return the words of a folder's license without its holder and year: a part of a project has its own."""
    return re.sub(rb"(?im)^.*(?:copyright|\(c\)).*$", b"", _license_text(folder) or b"").split()


def _license(folder: Path) -> list[bytes] | None:
    """Return the words of a folder's license; None if it has none."""
    text = _license_text(folder)
    return None if text is None else text.split()


def _license_text(folder: Path) -> bytes | None:
    found = next((path for name in _LICENSES if tracked_fs.is_file(path := folder / name)), None)
    return None if found is None else tracked_fs.read_up_to(found, LARGEST) or b""


class _Asked(NamedTuple):
    """What a question is about: a project, one of its files or none, a name, and all files of the project."""

    top: str
    file: str
    name: str
    files: list[str]

    @property
    def others(self) -> list[str]:
        return [each for each in self.files if each != self.file]

    @property
    def code(self) -> list[str]:
        """The Python files and the notebooks."""
        return [each for each in self.files if each.endswith((*PYTHON, NOTEBOOK))]

    @property
    def other_code(self) -> list[str]:
        """The Python files and the notebooks other than the file."""
        return [each for each in self.code if each != self.file]

    @property
    def other_python(self) -> list[str]:
        """The Python files other than the file."""
        return [each for each in self.others if each.endswith(PYTHON)]

    @property
    def texts(self) -> list[str]:
        """All files that are not Python."""
        return [each for each in self.files if not each.endswith(PYTHON)]

    def is_test(self, user: str) -> bool:
        """True if a file tests another one that is no test: what only tests use is in no program."""
        return user.endswith(PYTHON) and self._is_test(user) and not self._is_test(self.file)

    def _is_test(self, file: str) -> bool:
        return is_unit_test(os.path.relpath(file, self.top), _content(file))

    def pattern(self, before: bytes, after: bytes = b"", flags: int = 0) -> re.Pattern[bytes]:
        """Return a pattern with the name in it."""
        return re.compile(before + re.escape(self.name.encode()) + after, flags)


Question = Callable[[_Asked], "bool | list[str]"]
_QUESTIONS: dict[str, Question] = {}


def _question(function: Question) -> Question:
    """Make a function a question that `answer` knows by its name."""
    _QUESTIONS[function.__name__] = function
    return function


def _answered(top: Path, file: Path | str, question: Question, name: str = "") -> object:
    """Answer a question about a file, or about the whole project if none is given; the answer is recorded."""
    asked = (str(top), str(file), f"{question.__name__} {name}")
    return tracked_fs.answered("referenced", answer, tree_state.of_project, asked)


def _asked(top: Path, file: Path | str, question: Question, name: str = "") -> bool:
    return bool(_answered(top, file, question, name))


@cached_per_run
def answer(top: str, file: str, question: str) -> bool | list[str]:
    """Answer a question, without recording what was read. question: its name, and the name that it is about."""
    with tracked_fs.untracked():
        files = tree_state.project_files(top)
        if len(files) > tree_state.MOST_FILES:
            return True
        kind, _, name = question.partition(" ")
        return _QUESTIONS[kind](_Asked(top, file, name, files))


# -- questions ------------------------------------------------------------------------------------------


@_question
def _is_used(asked: _Asked) -> bool:
    users = (each for each in asked.others if _uses(each, asked.file, asked.name) and not asked.is_test(each))
    first = next(users, None)
    if first is None or not asked.name or is_installable(Path(asked.top)) or _asked(Path(asked.top), "", _is_dynamic):
        return first is not None
    return not _are_unused(asked, [first, *users])


@_question
def _is_dynamic(asked: _Asked) -> bool:
    return any(_DYNAMIC.search(_content(each)) for each in asked.code)


@_question
def _where_used(asked: _Asked) -> list[str]:
    return [each for each in asked.others if _uses(each, asked.file, asked.name)]


@_question
def _is_run(asked: _Asked) -> bool:
    return any(_uses(each, asked.file, "") and not is_in_copy(Path(each), Path(asked.top)) for each in asked.others)


@_question
def _is_alone(asked: _Asked) -> bool:
    return not asked.other_code


@_question
def _is_base(asked: _Asked) -> bool:
    word = re.escape(asked.name.encode())
    derived = re.compile(rb"\bclass[ \t]+\w+[ \t]*\([^()]*\b%s\b|\b%s[ \t]+as\b" % (word, word))
    return any(derived.search(_content(each)) and _uses(each, asked.file, asked.name) for each in asked.others)


@_question
def _looks_up(asked: _Asked) -> bool:
    return any(_BY_NAME.search(_content(each)) for each in asked.files if each.endswith(PYTHON))


@_question
def _calls(asked: _Asked) -> bool:
    return any(_may_call(each, asked.name.encode()) for each in asked.others)


@_question
def _sets(asked: _Asked) -> bool:
    return any(_may_set(each, asked.name.encode()) for each in asked.other_code)


@_question
def _sets_from_outside(asked: _Asked) -> bool:
    assigned = asked.pattern(rb"(?<![\w.])(?!self\b|cls\b)\w[\w.]*\.", rb"[ \t]*=(?!=)")
    code = asked.other_code
    return any(assigned.search(stripped(_content(each))) and _uses(each, asked.file, "") for each in code)


@_question
def _is_mentioned_below(asked: _Asked) -> bool:
    name, _, folder = asked.name.partition(" ")
    word = _word(name.encode())
    code = (each for each in asked.other_code if Path(each).is_relative_to(folder))
    return any(word.search(stripped(_content(each))) for each in code)


@_question
def _gives_keyword(asked: _Asked) -> bool:
    given = asked.pattern(rb"\b", rb"\b[ \t]*=(?!=)").pattern + b"|" + asked.pattern(rb"[\"'](?:--)?", rb"\b").pattern
    return any(re.search(given, stripped(_content(each))) for each in asked.other_code)


@_question
def _replaces(asked: _Asked) -> bool:
    defined = asked.pattern(rb"^def[ \t]+", rb"[ \t]*\(", re.M)
    return any(defined.search(_content(each)) and _uses(each, asked.file, "") for each in asked.other_python)


@_question
def _updates_scaler(asked: _Asked) -> bool:
    updating = [each for each in asked.other_python if _updates(each, asked.file)]
    if not all(_STEPS_SCALER.search(_content(each)) for each in updating):
        return True  # a hook, which gets a scaler that something else steps
    users = [each for each in asked.others if _uses(each, asked.file, "")] if updating else []
    return any(
        each in users or _uses(asked.file, each, "") or any(_uses(user, each, "") for user in users)
        for each in updating
    )


@_question
def _compiles(asked: _Asked) -> bool:
    return any(_COMPILE.search(_content(each)) for each in asked.files)


@_question
def _reads_deepspeed(asked: _Asked) -> bool:
    own = asked.file.endswith(PYTHON) and _READS_DEEPSPEED.search(stripped(_content(asked.file)))
    return bool(own) or any(_NAMES_DEEPSPEED.search(_content(each)) for each in asked.others)


@_question
def _reads_deepspeed_as_json(asked: _Asked) -> bool:
    name = re.escape(os.path.basename(asked.file).encode())
    naming = re.compile(rb"^.*(?<![\w.-])%s\b.*$" % name, re.M)
    commands = [line for each in asked.texts if each != asked.file for line in naming.findall(_content(each))]
    if commands and all(map(_GIVES_DEEPSPEED.search, commands)):
        code = (stripped(_content(each)) for each in asked.other_python)
        readers = [each for each in code if b"deepspeed_config" in each or naming.search(each)]
        return any(b"json.load" in each or _READS_AS_JSON.search(each) for each in readers)
    return any(_READS_AS_JSON.search(_content(each)) for each in asked.files)


@_question
def _reads_deepspeed_key(asked: _Asked) -> bool:
    item = asked.pattern(rb"(?:\.get\(|\.pop\(|\[)\s*[\"']", rb"[\"'](?!\s*\]\s*=(?!=))").pattern
    of_any, of_deepspeed = re.compile(item), re.compile(rb"(?i)(?:deepspeed|(?<![a-z])ds_)\w{0,60}" + item)
    config = os.path.basename(asked.file).encode()
    code = (stripped(_content(each)) for each in asked.code)
    return any((of_any if config in each and b"load" in each else of_deepspeed).search(each) for each in code)


@_question
def _chooses_deepspeed(asked: _Asked) -> bool:
    configs = b"\n".join(_content(each) for each in asked.files if each.endswith((".yaml", ".yml")))
    return {*_DISTRIBUTED.findall(configs)} == {b"DEEPSPEED"}


@_question
def _asks_for(asked: _Asked) -> bool:
    return any(asked.name.encode() in _content(each).lower() for each in asked.texts)


@_question
def _reads_any(asked: _Asked) -> bool:
    option = re.escape(asked.name.encode())
    return any(_reads_option(each, option) for each in asked.code)


@_question
def _passes(asked: _Asked) -> bool:
    flag = asked.name.encode().replace(b"_", b"[_-]")
    passed = re.compile(rb"(?i)--%s(?![\w-])(?![\s=]*[\"']?%s)" % (flag, _FULL))
    return any(passed.search(_content(each)) for each in asked.texts)


@_question
def _names_value(asked: _Asked) -> bool:
    named = asked.pattern(rb"[\"']", rb"[\"']")
    return any(named.search(_ADDED_OPTION.sub(b"", _content(each))) for each in asked.code)


@_question
def _gives(asked: _Asked) -> bool:
    """True if a file that is no code or text gives an option a value; the name has both."""
    option, _, value = asked.name.encode().partition(b" ")
    given = re.compile(
        rb"(?:^|[\s\"',{-])%s[\"']?(?:[ \t]*[:=][ \t]*|[ \t]+)[\"']?%s(?![\w-])"
        % (option.replace(b"_", b"[_-]"), re.escape(value)),
        re.M,
    )
    for file in asked.files:
        data = b"" if file.endswith((*PYTHON, NOTEBOOK, *MARKDOWN)) else _content(file)
        if given.search(data) and not _ACCELERATE.search(data):
            return True
    return False


@_question
def _lists_unread_keys(asked: _Asked) -> list[str]:
    return _unread_keys(asked.files, _content(asked.file))


def _are_unused(asked: _Asked, users: list[str]) -> bool:
    """True if only functions and classes of other files mention a name which nothing in the project mentions.

    That is known in a program that gets nothing by a name which is not in the code; a library has other users.
    """
    if not all(each.endswith(PYTHON) for each in users):
        return False
    python = [each for each in asked.files if each.endswith(PYTHON)]

    def mentions(name: str) -> list[str]:
        plain = name.encode()
        word = _word(plain)
        found = (each for each in python if plain in _content(each) and word.search(_without_imports(each)))
        return [each for each in found if not asked.is_test(each)]

    def is_unused(user: str, name: str) -> bool:
        return (
            name not in ENTRIES
            and Path(user).stem not in BY_TOOLS
            and mentions(name) == [user]
            and not any(_uses(each, user, name) for each in asked.texts)
        )

    others = [each for each in mentions(asked.name) if each not in (asked.file, *users)]
    return not others and all(
        (names := _definitions_with(_without_imports(each), asked.name))
        and all(is_unused(each, name) for name in names)
        for each in users
    )


def _without_imports(file: str) -> bytes:
    """Return a file's code without comments and imports; one under another name, and one of all names, stays."""
    code = b"\n" + stripped(_content(file))
    return summaries.IMPORT.sub(lambda found: found[0] if re.search(rb"\bas\b|\*", found[0]) else b"", code)


def _definitions_with(code: bytes, name: str) -> list[str]:
    """Return the top-level functions and classes that mention a name; none if other code of a file mentions it.

    Other code is also a definition that a decorator may pass on, or that more code of the file mentions.
    """
    word = _word(name.encode())
    found = []
    parts = [b"", *_STATEMENT.split(code)]
    for before, part in itertools.pairwise(parts):
        if word.search(part):
            defined = _DEFINED.match(part)
            if defined is None or before.startswith(b"@") or len(_word(defined[1]).findall(code)) != 1:
                return []
            if word.search(_run_at_import(part)):
                return []
            found.append(defined[1].decode())
    return found


def _run_at_import(definition: bytes) -> bytes:
    """Return what runs when a function or a class is defined: its header, and the statements of a class's body."""
    header = _HEADER.match(definition)
    if header is None:
        return definition
    body = definition[header.end() :]
    if not definition.startswith(b"class"):
        return header[0]
    indentation = re.search(rb"\n([ \t]+)\S", body)
    lines = [line for line in body.split(b"\n") if indentation and re.match(rb"%s\S" % indentation[1], line)]
    methods = [(line, _HEADER.match(line.lstrip())) for line in lines]
    return b"\n".join((header[0], *(line if found is None else found[0] for line, found in methods)))


# -- their parts ----------------------------------------------------------------------------------------


def exports_all(file: Path) -> bool:
    """True if the outermost package of a file re-exports all its names: `from .file import *`, in each package."""
    home = file.parent if file.stem == "__init__" else file
    package = home.parent / "__init__.py"
    if not tracked_fs.is_file(package):
        return False
    stars = {module for module, names in summaries.imports_of(tracked_fs.read(package)) if "*" in names}
    if not any(module.rpartition(".")[2] == home.stem for module in stars):
        return False
    return not tracked_fs.is_file(package.parent.parent / "__init__.py") or exports_all(package)


def builds_from(top: Path, folder: Path) -> bool:
    """True unless a project builds only the packages of other folders than this one.

    That is certain of `find_packages()` of setuptools, which wants an `__init__.py` in each folder, where the settings
    do not name the folder.
    """
    if folder in (top, top / "src"):
        return True
    try:
        settings = b"\n".join(tracked_fs.read(top / name) for name in _BUILD_FILES if tracked_fs.is_file(top / name))
    except OSError:
        return True
    named = re.search(rb"[\"'/=\s]%s(?:[\"'/\s]|$)" % re.escape(folder.name.encode()), settings)
    return named is not None or _FINDS_PACKAGES.search(settings) is None or b"namespace" in settings


def is_installable(top: Path) -> bool:
    """True if a project is built into a package, whose code other projects may use."""
    if any(tracked_fs.exists(top / name) for name in ("setup.py", "setup.cfg")):
        return True
    settings = top / "pyproject.toml"
    return tracked_fs.is_file(settings) and _BUILDS.search(tracked_fs.read(settings)) is not None


def _content(file: str) -> bytes:
    """Return the content of a file; empty for one that cannot be read, or is data."""
    try:
        if not file.endswith(PYTHON) and (tracked_fs.size_of(file) or 0) > LARGEST and not file.endswith(NOTEBOOK):
            return b""
        return _cells(file) if file.endswith(NOTEBOOK) else tracked_fs.read_regular_file(file)
    except OSError:
        return b""


@cached_per_run
def _cells(notebook: str) -> bytes:
    """Return the code and text of a notebook's cells, without what they printed. Raises `OSError`."""
    data = tracked_fs.read_regular_file(notebook)
    try:
        return "\n".join("".join(cell["source"]) for cell in json.loads(data)["cells"]).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return data


def _word(name: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a name as a whole word."""
    return re.compile(rb"\b%s\b" % re.escape(name))


def _uses(user: str, file: str, name: str) -> bool:
    """True if one file may use a top-level name of another one; without a name, the other file itself."""
    data = _content(user)
    wanted = (name or _module_name(file)).encode()
    if wanted not in data:
        return False
    word = _word(wanted)
    if word.search(data) is None:
        return False
    if user.endswith(PYTHON):
        code = stripped(data)
        if word.search(code) is None or (name and _only_imports(code, wanted, word)):
            return False
        return _code_uses(code, user, file, name)
    if user.lower().endswith(MARKDOWN):
        return any(word.search(part) for part in _MARKDOWN_CODE.findall(data))
    # A folder of a module's name in a path is not the module.
    return bool(name) or re.search(rb"\b%s\b(?!/)" % re.escape(wanted), data) is not None


def _only_imports(code: bytes, name: bytes, word: re.Pattern[bytes]) -> bool:
    """True if code imports a name under this name and does nothing with it.

    A package that passes it on is no user: those that take it from the package are.
    """
    if re.search(rb"\b%s\s+as\b" % re.escape(name), code):
        return False
    return word.search(summaries.IMPORT.sub(b"", b"\n" + code)) is None


def _may_call(user: str, method: bytes) -> bool:
    """True if a file may use a method of a class elsewhere; a class that uses its own of this name does not."""
    data = _content(user)
    if method not in data:
        return False
    word = re.escape(method)
    if not user.endswith(PYTHON):
        return re.search(rb"\b%s\b" % word, data) is not None
    code = stripped(data)
    if re.search(rb"^[ \t]+(?:async[ \t]+)?def[ \t]+%s\b" % word, code, re.M):
        code = re.sub(rb"\bself\.%s\b" % word, b"", code)
    return re.search(rb"\.\s*%s\b|[\"']%s[\"']" % (word, word), code) is not None


def _may_set(user: str, attribute: bytes) -> bool:
    """True if a file may set an attribute: it assigns to one of this name, or has the name as a string."""
    data = _content(user)
    if attribute not in data:
        return False
    word = re.escape(attribute)
    return bool(
        re.search(rb"\.%s\b[^\n=]*(?<![=!<>])=(?!=)|\bas[ \t]+[\w.]+\.%s\b" % (word, word), data)
        or re.search(rb"\\?[\"']%s\\?[\"']" % word, data)
    )


def _unread_keys(files: list[str], names: bytes) -> list[str]:
    """Return `FILE:KEY` for the keys of `unread_keys`; names: code that contains the names of the configs."""
    configs = [(each, _content(each)) for each in files if each.endswith((".yaml", ".yml", ".toml"))]
    wanted = [(each, data) for each, data in configs if _PRECISION_KEY.search(data) and not _OF_OTHERS.search(data)]
    code = b"\n".join(stripped(_content(each)) for each in files if each.endswith(PYTHON)) if wanted else b""
    if not code or _EXPANDS.search(code) or any(each.endswith(NOTEBOOK) for each in files):
        return []
    found = []
    for file, data in wanted:
        if os.path.basename(file).encode() not in names:
            continue
        for place in _PRECISION_KEY.finditer(data):
            section = _section(data[: place.start()], len(place[1]))
            key = re.escape(place[2])
            handed = section and re.search(rb"\*\*[^,)\n]*[\[.][\"']?%s\b" % re.escape(section), code)
            if not handed and not re.search(rb"\b%s\b" % key, code):
                found.append(f"{file}:{place[2].decode()}")
    return found


def _section(before: bytes, indentation: int) -> bytes:
    """Return the last key before a line that is less indented; empty at the top level."""
    above = re.findall(rb"^([ \t]*)[\"']?([\w-]+)[\"']?[ \t]*:[ \t]*$", before, re.M)
    return next((key for spaces, key in reversed(above) if len(spaces) < indentation), b"")


def _reads_option(file: str, name: bytes) -> bool:
    """True if a file may read an option of this name; `torch.amp` is none."""
    data = _content(file)
    code = stripped(data) if file.endswith(PYTHON) else data
    return (
        re.search(rb"(?<!torch)(?<!cuda)(?<!apex)\.\s*%s\b" % name, code) is not None
        or re.search(rb"(?:\bgetattr\([^()]*,|\bhasattr\([^()]*,|\[|\.(?:get|pop)\()\s*\\?[\"']%s\\?[\"']" % name, code)
        is not None
        or _HANDED_ON.search(_LOGGED.sub(b"", code)) is not None
    )


def updates(code: bytes) -> bool:
    """True if code, without comments, may update a GradScaler: no progress bar, and no object with its own `update`."""
    return any(_may_be_scaler(each["object"], code) for each in _UPDATE.finditer(code))


def _may_be_scaler(name: bytes, code: bytes) -> bool:
    if name == b"self":
        return _IS_SCALER.search(code) is not None
    return b"tqdm" not in code or re.search(rb"\bas[ \t]+%s[ \t]*:" % re.escape(name), code) is None


def _updates(user: str, file: str) -> bool:
    """True if a file may update the scaler of another one; a test does not train."""
    data = _content(user) if not is_test(os.path.relpath(user, os.path.commonpath((user, file)))) else b""
    if b".update(" not in data or not _SCALER.search(data):
        return False
    code = stripped(data)
    return updates(code) and (not _OWN_SCALER.search(code) or _uses(user, file, ""))


def _code_uses(code: bytes, user: str, file: str, name: str) -> bool:
    """True if code that contains a name, or without a name that of a file, may mean the one of that file by it."""
    imports = summaries.imports_of(code)
    extended = b"sys.path" in code
    explicit = [module for module, names in imports if name in names]
    modules = [module for module, names in imports if not (name and names) or "*" in names]
    inner = [_inner(module, each) for module, names in imports for each in names]
    named = (*explicit, *modules, *inner)
    if any(_may_be(module, user, file, extended) for module in named):
        return True
    if name and any(_imports(tree.file_of(module, user), name) for module in named):
        return True  # of a module that takes it from the file, perhaps
    wanted = re.escape((name or _module_name(file)).encode())
    if explicit or (name and re.search(rb"^(?:(?:async[ \t]+)?def|class)[ \t]+%s\b" % wanted, code, re.M)):
        return False
    return re.search(rb"[\"'](?:[\w./-]*[.:/])?%s(?:\.py)?[\"']" % wanted, code) is not None


def _imports(file: str | None, name: str) -> bool:
    """True if a module imports a name from another one."""
    return file is not None and any(name in names for _, names in summaries.imports_of(_content(file)))


def _inner(package: str, name: str) -> str:
    """Return the submodule that `from package import name` may import."""
    return f"{package}{'' if package.endswith('.') else '.'}{name}"


def _module_name(file: str) -> str:
    """Return the last name of the module that a file is."""
    folder, name = os.path.split(file)
    stem = name.partition(".")[0]
    return os.path.basename(folder) if stem == "__init__" else stem


def _may_be(module: str, user: str, file: str, extended: bool) -> bool:
    """True if a module that a file imports may be another file, or a package that takes names from that file.

    extended: the importing code changes where modules are searched.
    """
    last = module.rpartition(".")[2]
    found = tree.file_of(module, user)
    if found == file:
        return True
    if found is not None and found.endswith("__init__.py") and file.startswith(os.path.dirname(found) + os.sep):
        return True
    if found is not None and not extended:
        return False
    places = {_module_name(file), *Path(file).parts[:-1]}
    root = module.partition(".")[0]
    is_library = root in summaries.LIBRARIES or root in sys.stdlib_module_names
    return last in places and (root in places or not is_library)
