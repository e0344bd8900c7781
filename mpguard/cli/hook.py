"""Lets `accelerate launch --config mp.yaml train.py` work, with the policy in force in its workers.

    mpguard hook install [--user]
    mpguard hook status
    mpguard hook uninstall [--user]

Opt-in: one line in one `.pth` file of this environment, which does nothing without an mp.yaml.
Exit status: 0 done, or installed; 1 not installed; 2 could not be written.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from mpguard.core.errors import ConfigError
from mpguard.runtime.plan import POLICY

NAME = "mpguard_hook.pth"

#: Imports nothing unless a policy was handed over, or this is `accelerate`; pip leaves the file behind
#: when mpguard is uninstalled, so a missing mpguard is no error.
LINE = (
    f"import os, sys; exec('try:\\n import mpguard.runtime.launch.startup_hook\\nexcept ImportError:\\n pass') "
    f"if os.environ.get('{POLICY}') or any('accelerate' in word for word in sys.orig_argv[:8]) else None\n"
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("install", "uninstall", "status"))
    parser.add_argument("--user", action="store_true", help="the user's site-packages instead of the environment's")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of `status`")


def run(options: argparse.Namespace) -> int:
    if options.action == "install":
        return _install(_folder(options.user), options.user)
    if options.action == "uninstall":
        return _uninstall(_folder(options.user))
    return _status(options.format)


def _folder(user: bool) -> Path:
    return Path(site.getusersitepackages() if user else sysconfig.get_path("purelib"))


def _install(folder: Path, user: bool) -> int:
    path = folder / NAME
    _refuse(folder, user)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(LINE, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    if not _runs():
        path.unlink()
        raise ConfigError(
            f"{path}: this Python ({sys.executable}) does not run import lines in .pth files there; "
            "nothing is installed. Use `mpguard launch --config mp.yaml train.py`, which needs no hook"
        )
    print(
        f"Wrote one file: {path} (1 line).\n"
        f"  {LINE.rstrip()}\n"
        "With it `accelerate launch --config mp.yaml train.py` works, and its policy is in force in the workers.\n"
        "Without an mp.yaml it does nothing. Remove it with `mpguard hook uninstall`."
    )
    return 0


def _refuse(folder: Path, user: bool) -> None:
    """Raises `ConfigError` for environments that are not ours to write to."""
    isolated = sys.prefix != sys.base_prefix
    if (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists() and not isolated:
        raise ConfigError(
            f"{folder}: this Python is externally managed; install mpguard in a virtual environment, and the hook there"
        )
    if user and (isolated or not site.ENABLE_USER_SITE):
        raise ConfigError(f"{folder}: this Python does not read the user's site-packages; leave out --user")
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        hint = "" if user or isolated else ", or use --user for your own site-packages"
        raise ConfigError(f"{folder}: is read-only; install mpguard in an environment of your own{hint}")


def _uninstall(folder: Path) -> int:
    path = folder / NAME
    if not path.exists():
        others = [str(other) for other in _installed() if other != path]
        print(f"The hook is not installed in {folder}." + (f" It is in {', '.join(others)}." if others else ""))
        return 0
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be removed: {error.strerror}") from None
    print(f"Removed {path}.")
    return 0


def _status(form: str) -> int:
    paths = _installed()
    current = [path.read_text(encoding="utf-8") == LINE for path in paths]
    works = bool(paths) and _runs()
    if form == "json":
        files = [{"path": str(path), "current": new} for path, new in zip(paths, current, strict=True)]
        print(json.dumps({"version": 1, "installed": bool(paths), "works": works, "files": files}))
    elif not paths:
        print(f"Not installed. `mpguard hook install` writes {_folder(False) / NAME}.")
    else:
        for path, new in zip(paths, current, strict=True):
            print(f"Installed: {path}" + ("" if new else " (of another version; `mpguard hook install` renews it)"))
        print("It works." if works else "It has no effect: this Python does not run it.")
    return 0 if works and all(current) else 1


def _installed() -> list[Path]:
    folders = dict.fromkeys((_folder(False), _folder(True)))
    return [folder / NAME for folder in folders if (folder / NAME).is_file()]


def _runs() -> bool:
    """Whether a fresh interpreter of this environment really runs the line."""
    code = "import sys; sys.exit(0 if 'mpguard.runtime.launch.startup_hook' in sys.modules else 3)"
    environment = {**os.environ, POLICY: '{"name": "probe"}'}
    return (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True).returncode == 0
    )
