"""The files, flags and environment variables that a run is made of."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import ConfigError, did_you_mean_file
from mpguard.document import Document, dialects, read
from mpguard.explain.model import Given, Origin, SettingLayer
from mpguard.lint.project import launch_lines
from mpguard.lint.source.files import kind_of

if TYPE_CHECKING:
    from mpguard.explain.script import Script
    from mpguard.lint.project.launch_lines import Launch

StartedBy = Literal["accelerate", "mpguard", "deepspeed", "torchrun", "python"]

#: Environment variables that can change the precision of a run.
_VARIABLES = ("ACCELERATE_", "FSDP_", "MPGUARD_POLICY", "MPGUARD_CONFIG")
_ASSIGNMENT = re.compile(
    r"(?:^|\s)(?:export\s+)?([A-Z][A-Z0-9_]*)=(\"[^\"\n$]*\"|'[^'\n]*'|[^\s\"'$;&|]*)(?=[\s;\\]|$)"
)
_PYTHON = re.compile(
    r"(?:^|\s)(?:[\w./-]*/)?python[\d.]*(?:[ \t]|\\\n)+(?:-[uOBE](?:[ \t]|\\\n)+)*"
    r"(?P<script>[^\s\\$]+\.py)(?P<rest>(?:\\\n|[^\n;|&])*)"
)


@dataclasses.dataclass(frozen=True)
class RunInputs:
    """What a run is made of.

    config: accelerate's config. flags: of `accelerate launch`, by name with `_`. arguments: the script's own, with
    their place. deepspeed: a DeepSpeed config that was named by itself. stock: explain what happens without mpguard.
    """

    launcher: StartedBy = "accelerate"
    config: Document | None = None
    flags: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    script: Script | None = None
    arguments: tuple[Given, ...] = ()
    deepspeed: Document | None = None
    stock: bool = False
    notes: tuple[str, ...] = ()

    @property
    def launches(self) -> bool:
        """True if accelerate's launcher starts the workers, which reads the config and sets their variables."""
        return self.launcher in ("accelerate", "mpguard")


def origin_of(document: Document, key: str, layer: SettingLayer = "YAML") -> Origin:
    """Return the place of a dotted key of a config; without a line if it does not have the key."""
    entry = document.entry(key)
    layer = "code" if document.format == "python" else layer
    return Origin(layer, document.path, document.position(entry.key_span[0])[0] if entry is not None else None)


def gather(
    paths: Sequence[Path],
    launch: str | None = None,
    environment: Mapping[str, str] | None = None,
    stock: bool = False,
    hooked: bool = False,
) -> RunInputs:
    """Return the inputs of a run: each file by its kind, the command of `launch`, and this process's variables.

    paths: accelerate's config, a DeepSpeed JSON, the script, a shell script with the launch line; at most one of each.
    launch: a command line, such as `accelerate launch --mixed_precision bf16 train.py`. hooked: the startup hook is
    installed, with which `accelerate launch` enforces a policy.
    Raises `ConfigError` for files that cannot be read, are of no such kind, or of the same kind.
    """
    files = _by_kind(paths)
    line = _launch_line(files.get("launch"), launch, files.get("python"))
    variables = {
        name: Given(value, Origin("environment", name=name), name)
        for name, value in (os.environ if environment is None else environment).items()
        if name.startswith(_VARIABLES)
    }
    variables |= line.variables
    script = files.get("python") or line.script
    deepspeed = files.get("deepspeed")
    if files.keys() == {"deepspeed"} and line.launcher is None:  # by itself: as `deepspeed.initialize` reads it
        line = dataclasses.replace(line, launcher="deepspeed")
    config, notes = _config(files.get("accelerate"), line, script, variables)
    if script is not None:
        from mpguard.explain.script import read_script

        found = read_script(script)
    else:
        found = None
    launcher = line.launcher
    guarded = config is not None and not stock and _names_recipe(config)
    if launcher is None or (launcher == "accelerate" and hooked):
        launcher = "mpguard" if guarded else "accelerate"
    if config is not None and config.require().get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(f"{config.path}: is for SageMaker, whose launcher `explain` does not know")
    return RunInputs(
        launcher=launcher,
        config=config,
        flags=line.flags,
        environment=variables,
        script=found,
        arguments=line.arguments,
        deepspeed=_document(deepspeed) if deepspeed is not None else None,
        stock=stock or launcher == "accelerate",
        notes=notes,
    )


def trainer_config(paths: Sequence[Path]) -> Document | None:
    """Return the config of a training program that starts itself, if that is the only file; None otherwise.

    Of a script, the last precision that it gives to Megatron Bridge.
    """
    if len(paths) != 1 or not paths[0].is_file():
        return None
    if paths[0].suffix == ".py" and b"megatron.bridge" in tracked_fs.read(paths[0]):
        from mpguard.explain.script import bridge_config

        return bridge_config(paths[0])
    if kind_of(str(paths[0])) != "config":
        return None
    document = read(paths[0])
    return document if not document.problems and document.kind in dialects.DIALECTS else None


def _by_kind(paths: Sequence[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        kind = _kind(path)
        if kind in files:
            raise ConfigError(f"{path}: is a second {_NAMES[kind]}, after {files[kind]}; `explain` explains one run")
        files[kind] = path
    return files


_NAMES = {
    "accelerate": "config of accelerate", "deepspeed": "config of DeepSpeed", "python": "training script",
    "launch": "file with a launch line",
}  # fmt: skip


def _kind(path: Path) -> str:
    """Return the kind of a file. Raises `ConfigError` if it is none that a run is made of."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{path}: is a link that leads to no file, or to itself")
    if not path.exists():
        raise ConfigError(f"{path}: no such file{did_you_mean_file(str(path))}")
    if not path.is_file():
        raise ConfigError(
            f"{path}: is not a file; a config, a training script or a script with a launch line is needed"
        )
    kind = kind_of(str(path))
    if kind in ("python", "launch"):
        return kind
    if kind == "config":
        document = _document(path)
        if document.kind in ("accelerate", "deepspeed"):
            return document.kind
        if document.kind is not None and document.kind in dialects.DIALECTS:
            title = dialects.DIALECTS[document.kind].title
            raise ConfigError(f"{path}: a config of {title} is explained alone; give no other file, and no --launch")
        raise ConfigError(f"{path}: {dialects.unread(document)}")
    if other := dialects.other_file(path):
        raise ConfigError(f"{path}: {other}")
    raise ConfigError(
        f"{path}: `explain` reads accelerate's config, a DeepSpeed JSON, a Python script, and launch lines in .sh, "
        "Makefile, .md"
    )


def _document(path: Path) -> Document:
    document = read(path)
    document.require()
    return document


def _names_recipe(config: Document) -> bool:
    return (
        config.entry("fp8_config.mpguard_recipe") is not None or settings.nearest(Path(config.path)).recipe is not None
    )


# -- launch lines ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Line:
    """A launch line. launcher: None if there is none. config: the file that it names."""

    launcher: StartedBy | None = None
    flags: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    arguments: tuple[Given, ...] = ()
    script: Path | None = None
    config: Path | None = None


def _launch_line(file: Path | None, command: str | None, script: Path | None) -> _Line:
    """Return the launch line of a file or of a command. Raises `ConfigError` if there is not exactly one."""
    if file is not None and command is not None:
        raise ConfigError(f"{file} and --launch both have a launch line; give one of them")
    if command is not None:
        found = launch_lines.read(f"{command}\n".encode(), "")
        python = _PYTHON.search(command)
        if not found and python is not None:
            return _python_line(command, python, None, Path())
        if len(found) != 1:
            raise ConfigError(
                f"--launch {command!r}: has {len(found) or 'no'} launch line{'s' * (len(found) > 1)}; one of "
                "`accelerate launch`, `mpguard launch`, `torchrun`, `deepspeed` or `python` is needed, with a script"
            )
        return _line_of(found[0], command, None, Path())
    if file is None:
        return _Line()
    try:
        data = tracked_fs.read(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    text = data.decode("utf-8", "surrogateescape")
    found = [
        launch
        for launch in launch_lines.read(data, str(file))
        if script is None or launch.script is None or Path(launch.script.text or script.name).name == script.name
    ]
    plain = list(_PYTHON.finditer(text)) if not found else []
    if len(plain) == 1:
        return _python_line(text, plain[0], str(file), file.parent)
    if len(found) != 1:
        of = f" of {script}" if script is not None else ""
        hint = "name the script, or give the line itself with --launch" if found else "give the command with --launch"
        raise ConfigError(f"{file}: has {len(found) or 'no'} launch line{'s' * (len(found) > 1)}{of}; {hint}")
    return _line_of(found[0], text, str(file), file.parent)


def _line_of(launch: Launch, text: str, file: str | None, folder: Path) -> _Line:
    def place(offset: int, layer: SettingLayer) -> Origin:
        return Origin(layer, file, text.count("\n", 0, offset) + 1 if file is not None else None)

    flags = {
        name: Given(
            True if word is None else word.text if word.text is not None else "",
            dataclasses.replace(
                place((word.span if word is not None else launch.span)[0], "launch flag"), name=f"--{name}"
            ),
            f"--{name}",
        )
        for name, word in launch.options.items()
    }
    named = launch.options.get("config_file") or launch.options.get("config")
    config = _located(named.text, folder) if named is not None and named.text else None
    script = launch.script.text if launch.script is not None and not launch.module else None
    found = _located(script, folder) if script else None
    module = launch.script.text if launch.module and launch.script is not None else None
    launcher: StartedBy = launch.launcher
    arguments = launch.arguments
    if module == "mpguard.run":  # python -m mpguard.run [--config FILE] SCRIPT
        words = [word.text or "" for word in arguments]
        if "--config" in words[:-1]:
            config = _located(words[words.index("--config") + 1], folder) or config
        place_of_script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
        found = _located(words[place_of_script], folder) if place_of_script < len(words) else None
        arguments = arguments[place_of_script + 1 :]
        launcher = "mpguard" if launcher == "accelerate" else launcher
    variables = _assignments(text[: launch.span[0]], place)
    given = tuple(Given(word.text or "", place(word.span[0], "TrainingArguments")) for word in arguments)
    return _Line(launcher, flags, variables, given, found, config)


def _python_line(text: str, match: re.Match[str], file: str | None, folder: Path) -> _Line:
    """Return the line `python train.py`, which starts the script without a launcher."""

    def place(offset: int, layer: SettingLayer) -> Origin:
        return Origin(layer, file, text.count("\n", 0, offset) + 1 if file is not None else None)

    words = tuple(
        Given(word[0].strip("\"'"), place(match.start("rest") + word.start(), "TrainingArguments"))
        for word in re.finditer(r"[^\s\\]+", match["rest"])
    )
    variables = _assignments(text[: match.start("script")], place)
    return _Line("python", {}, variables, words, _located(match["script"], folder))


def _assignments(text: str, place: object) -> dict[str, Given]:
    """Return the variables that a shell text sets before the launch: `export NAME=value`, `NAME=value command`."""
    assert callable(place)
    found = {}
    for match in _ASSIGNMENT.finditer(text):
        if match[1].startswith(_VARIABLES):
            found[match[1]] = Given(match[2].strip("\"'"), place(match.start(1), "environment"), match[1])
    return found


def _located(name: str, folder: Path) -> Path | None:
    """Return a file that a launch line names: from the current folder, else from that of the line's file."""
    return next((path for path in (Path(name), folder / name) if path.is_file()), None)


# -- the config -----------------------------------------------------------------------------------


def _config(
    given: Path | None, line: _Line, script: Path | None, variables: Mapping[str, Given]
) -> tuple[Document | None, tuple[str, ...]]:
    """Return accelerate's config, and notes on how it was chosen."""
    if given is not None and line.config is not None and not given.samefile(line.config):
        raise ConfigError(f"{given}: the launch line names another config, {line.config}; give one of them")
    path = given or line.config
    if path is not None:
        return _document(path), ()
    flag = line.flags.get("config_file") or line.flags.get("config")
    if flag is not None:
        raise ConfigError(f"{flag.origin.file or '--launch'}: names the config {flag.value!r}, which does not exist")
    if line.launcher is None and Path("mp.yaml").is_file() and script is None:
        return _document(Path("mp.yaml")), ()
    cached = default_config()
    if line.launcher in (None, "accelerate") and "cpu" not in line.flags and cached is not None:
        note = f"No config is named: `accelerate launch` reads {cached}, which `accelerate config` wrote."
        return _document(cached), (note,)
    if line.launcher is None and script is None and not variables:
        raise ConfigError("nothing to explain: give an mp.yaml, a training script, or a launch line (--launch)")
    return None, ()


def default_config() -> Path | None:
    """Return the config that `accelerate launch` reads if none is named; None if there is none."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", str(Path(cache, "huggingface")))
    path = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None
