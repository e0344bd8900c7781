"""The files near a config: the Python code that it may launch, and the accelerate configs that name it.

Without a launch line, these may be all files in its folder and in the one above.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.project.launch_lines import Launch

#: The most files of a folder, and bytes of a file, that are read: enough for a project, and a bound for large trees.
MOST_FILES, LARGEST = 60, 256 << 10
#: A launch config has some hundred bytes; files next to the code that are larger are data.
LARGEST_CONFIG = 64 << 10
#: Code that sets, or may set, the precision itself, or the values that a DeepSpeed config leaves open.
FILLS_IN = r"Trainer\b|TrainingArguments|mixed_precision"


def mentions(config: str, pattern: str, launches: Iterable[tuple[str, Launch]] = ()) -> bool:
    """True if code that a config may launch matches a pattern outside comments.

    That is the code in its folder, in the one above, and in the folders of the scripts that `launches` start with it.
    """
    folder = Path(config).absolute().parent
    found = re.compile(pattern.encode())
    folders = {folder, folder.parent, *(Path(script).parent for script, _ in launches)}
    return any(found.search(code) for each in folders for code in _code(each))


def flagged(option: str, launches: Iterable[tuple[str, Launch]]) -> bool:
    """True if a launch line has an option, or may have it."""
    return any(option in launch.options or launch.hidden for _, launch in launches)


@cached_per_run
def _code(folder: Path) -> tuple[bytes, ...]:
    return tuple(stripped(data) for _, data in files(folder, (".py",), LARGEST))


def naming(path: str) -> list[Document]:
    """Return the accelerate configs, in a DeepSpeed file's folder or the one above, that name it."""
    from mpguard.core.errors import ConfigError
    from mpguard.document import read

    file = Path(path).absolute()
    found: list[Document] = []
    for candidate in (each for folder in (file.parent, file.parent.parent) for each in _launch_configs(folder)):
        try:
            config = read(candidate)
            named = config.entry("deepspeed_config.deepspeed_config_file") if config.require() else None
        except ConfigError:
            continue
        if config.kind == "accelerate" and named is not None and Path(str(named.value)).name == file.name:
            found.append(config)
    return found


@cached_per_run
def _launch_configs(folder: Path) -> tuple[Path, ...]:
    """Return the YAML files of a folder that mention a DeepSpeed file."""
    return tuple(
        path for path, data in files(folder, (".yaml", ".yml"), LARGEST_CONFIG) if b"deepspeed_config_file" in data
    )


def deepspeed_precision(config: Mapping[str, Any]) -> str | None:
    """Return `bf16` or `fp16` if a DeepSpeed config enables one of the two; else None."""
    sections = {name: config.get(name) for name in ("bf16", "fp16")}
    on = [name for name, each in sections.items() if isinstance(each, dict) and each.get("enabled") is True]
    return on[0] if len(on) == 1 else None


@cached_per_run
def deepspeed_half(folder: Path) -> str:
    """Return "FP16" or "BF16" if the DeepSpeed JSONs in a folder all cast the model to it; else an empty string."""
    found: set[str] = set()
    for _, data in files(folder, (".json",), LARGEST_CONFIG):
        if b'"zero_optimization"' not in data and b'"train_micro_batch_size_per_gpu"' not in data:
            continue
        try:
            config = json.loads(data)
        except ValueError:
            return ""
        mode = deepspeed_precision(config) if isinstance(config, dict) else None
        found.add(mode.upper() if mode is not None and "keep_in_fp32_modules" not in config else "")
    return found.pop() if len(found) == 1 else ""


@cached_per_run
def settings_in(folder: Path) -> tuple[tuple[frozenset[str], dict[str, object]], ...]:
    """Return the names that each Python file of the config folders in a folder sets, and the literals among them.

    Only of a file that does nothing else.
    """
    found: list[tuple[frozenset[str], dict[str, object]]] = []
    for name in tracked_fs.list_names(folder, ("config", "configs")):
        for _, data in files(folder / name, (".py",), LARGEST_CONFIG):
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                if (values := _settings(ast.parse(data))) is not None:
                    found.append(values)
    return tuple(found)


def _settings(module: ast.Module) -> tuple[frozenset[str], dict[str, object]] | None:
    values: dict[str, ast.expr] = {}
    for each in module.body:
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            values[each.targets[0].id] = each.value
        elif not isinstance(each, ast.Import) and not (
            isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        ):
            return None
    return frozenset(values), {name: each.value for name, each in values.items() if isinstance(each, ast.Constant)}


def files(folder: Path, endings: tuple[str, ...], largest: int) -> Iterator[tuple[Path, bytes]]:
    """Yield the first files of a folder with one of some suffixes, and their contents; not those that are too large."""
    left = MOST_FILES
    for path in (folder / name for name in tracked_fs.list_names(folder, endings)):
        if left and tracked_fs.is_file(path):
            with contextlib.suppress(OSError):
                data = tracked_fs.read_up_to(path, largest)
                if data is not None:
                    left -= 1
                    yield path, data
