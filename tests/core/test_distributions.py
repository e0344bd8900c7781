"""Entry points that are read from the folders of `sys.path` are those that `importlib.metadata` finds."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import distributions
import pytest

from mpguard.core.distributions import EntryPoint, entry_points, installed_version

GROUPS = ("mpguard.rules", "mpguard.plugins", "mpguard.recipes", "console_scripts", "pytest11", "no.such.group")


def expected(group: str) -> list[EntryPoint]:
    return sorted(
        EntryPoint(each.name, each.value, each.dist.name if each.dist else "")
        for each in importlib.metadata.entry_points(group=group)
    )


@pytest.mark.parametrize("group", GROUPS)
def test_they_are_those_of_the_environment(group: str) -> None:
    assert sorted(entry_points(group)) == expected(group)


def test_of_distributions_with_one_name_the_first_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    distributions.install(first, "", groups=("mpguard.rules", "mpguard.recipes"), value="of_the_first")
    info = distributions.install(second, "", groups=("mpguard.rules",), value="of_the_second")
    other = distributions.install(tmp_path / "third", "", value="of_another")
    other.rename(second / "An_other.pkg-2.0.dist-info")
    (info / "entry_points.txt").write_text("# comment\n[other]\na=b\n[mpguard.rules]\nx = of_the_second\n")
    monkeypatch.syspath_prepend(second)
    monkeypatch.syspath_prepend(first)
    for group in GROUPS:
        assert sorted(entry_points(group)) == expected(group)
    values = {each.value for each in entry_points("mpguard.rules")}
    assert {"of_the_first", "of_another"} <= values and "of_the_second" not in values


def test_distributions_in_an_archive_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = distributions.install(tmp_path / "site", "", value="in_an_archive")
    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in info.iterdir():
            file.write(path, f"{info.name}/{path.name}")
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path])
    assert "in_an_archive" in {each.value for each in entry_points("mpguard.rules")}
    assert sorted(entry_points("mpguard.rules")) == expected("mpguard.rules")


def test_versions_are_those_of_the_environment() -> None:
    for name in ("pytest", "libcst", "pyyaml"):
        assert installed_version(name) == importlib.metadata.version(name)
    assert installed_version("no_such_package") is None
