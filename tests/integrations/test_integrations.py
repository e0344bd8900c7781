"""The configurations in docs/integrations.md parse, start the server, and use settings that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY

from mpguard.core import settings
from mpguard.server import client_settings
from mpguard.server.client_settings import ClientSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")


def block(language: str, holding: str) -> str:
    """Return the code block of a language that contains a text."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if holding in text]
    assert len(found) == 1, (language, holding)
    return str(found[0])


def test_vs_code() -> None:
    config = json.loads(block("json", "glspc"))
    assert [config["glspc.server.command"], *config["glspc.server.commandArguments"]] == ["mpguard", "server"]
    assert client_settings.read(config["glspc.server.initializationOptions"]) == ClientSettings(preview=True)


def test_helix() -> None:
    config = tomllib.loads(block("toml", "language-server.mpguard"))
    server = config["language-server"]["mpguard"]
    assert [server["command"], *server["args"]] == ["mpguard", "server"]
    assert client_settings.read(server["config"]) == ClientSettings(preview=True)
    assert all("mpguard" in language["language-servers"] for language in config["language"])


def test_neovim() -> None:
    code = block("lua", "vim.lsp.config")
    assert "cmd = { 'mpguard', 'server' }" in code and "settings = { mpguard = { preview = true } }" in code
    if shutil.which("luac"):
        subprocess.run(["luac", "-p", "-"], input=code, text=True, check=True)


def test_all_settings_are_in_the_table_and_no_others() -> None:
    documented = set(
        re.findall(r"`mpguard\.(\w+)`", PAGE.split("editor's setting")[1].split("`mpguard server --iso")[0])
    )
    assert documented == set(client_settings._KEYS)


def test_settings_of_files_are_all_in_their_table(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.split("## Settings")[1].split("## Editors")[0], re.M)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(settings._KEYS)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mp.yaml").write_text("mixed_precision: bf16\n")
    (tmp_path / "pyproject.toml").write_text(block("toml", "[tool.mpguard]"))
    found = settings.nearest(tmp_path)
    assert found.config_paths() and found.per_file_ignores == {"legacy/": ("MPG1",)}


@pytest.mark.parametrize("tool", ["tox.ini", "noxfile.py", ".PHONY: mpguard"])
def test_other_tools_run_the_linter(tool: str) -> None:
    (found,) = (text for text in re.findall(r"```\w+\n(.*?)```", PAGE, re.S) if tool in text)
    assert "lint" in found
    if tool == "noxfile.py":
        compile(found, tool, "exec")
