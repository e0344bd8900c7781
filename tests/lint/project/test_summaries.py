"""Summaries of modules: kept between runs and shared by workers, never stale."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from mpguard.core import tracked_fs
from mpguard.lint.model.rule import rules
from mpguard.lint.project import summaries
from mpguard.lint.project.summaries import of_file, summarize
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, kind_of


@pytest.fixture(autouse=True)
def _new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "_kept", {})
    monkeypatch.setattr(tracked_fs, "SETTLED_NS", -1)  # files count as old
    tracked_fs.clear_run_caches()


def test_imports_and_bases() -> None:
    summary = summarize(
        b"import os.path as p, torch\n"
        b"from a.b import (  # see (1)\n    one as first,\n    two,\n)\n"
        b"from .c import three, \\\n    four\n"
        b"class A(nn.Module, base.B):\n    pass\n"
    )
    assert dict(summary.imports) == {
        "os.path": frozenset(),
        "torch": frozenset(),
        "a.b": frozenset({"one", "two"}),
        ".c": frozenset({"three", "four"}),
    }
    assert summary.bases == {"Module", "B"}
    assert not summary.trains
    assert summarize(b"loss.backward()\n").trains


def test_a_list_of_imports_that_does_not_end_stops_at_the_next_one() -> None:
    summary = summarize(b"from a import (one,\nfrom b import (two)\n")
    assert dict(summary.imports)["b"] == {"two"}


def test_a_changed_file_is_summarized_again(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import one\n")
    before = of_file(str(file))
    assert before is not None
    assert of_file(str(file)) is before
    file.write_text("import another\n")
    tracked_fs.clear_run_caches()
    after = of_file(str(file))
    assert after is not None
    assert dict(after.imports) == {"another": frozenset()}


def test_what_an_editor_has_open_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import saved\n")
    tracked_fs.overlay({str(file): b"import unsaved\n"})
    try:
        found = of_file(str(file))
        assert summaries.to_keep([str(file)]) == []
    finally:
        tracked_fs.overlay({})
    assert found is not None
    assert dict(found.imports) == {"unsaved": frozenset()}
    saved = of_file(str(file))
    assert saved is not None
    assert dict(saved.imports) == {"saved": frozenset()}


def test_a_file_that_does_not_exist_has_no_summary(tmp_path: Path) -> None:
    assert of_file(str(tmp_path / "missing.py")) is None


def test_a_file_that_may_change_without_a_trace_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_fs, "SETTLED_NS", 1 << 62)
    file = tmp_path / "a.py"
    file.write_text("import one\n")
    assert of_file(str(file)) is not None
    assert summaries._kept == {}
    assert summaries.to_keep([str(file)]) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_workers_share_the_summaries_of_a_large_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "settings.py").write_text("import torch\n\nDTYPE = torch.float16\n")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom settings import DTYPE\n\nmodel, loader = torch.nn.Linear(3, 3), []\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for x in loader:\n    with torch.autocast('cuda', dtype=DTYPE):\n        loss = model(x).sum()\n"
        "    loss.backward()\n    optimizer.step()\n"
    )
    for number in range(120):
        (tmp_path / f"module_{number}.py").write_text(f"import module_{number + 1}\n")
    targets = [Target(str(path), kind_of(str(path)) or "python") for path in sorted(tmp_path.glob("*.py"))]
    alone = Engine(rules(), Options()).run(targets, jobs=1)
    assert [finding.code for report in alone for finding in report.findings] == ["MPG201"]

    tracked_fs.clear_run_caches()
    summaries._kept.clear()
    parent = os.getpid()
    monkeypatch.setattr(summaries, "trains", lambda data: os.getpid() != parent and b".step(" in data)
    assert Engine(rules(), Options()).run(targets, jobs=2) == alone
    assert summaries._kept.keys() == {target.path for target in targets}, "the parent has what its workers summarized"
    assert [path for path, (_, each) in summaries._kept.items() if each.trains] == [str(tmp_path / "train.py")]


@pytest.mark.parametrize("package", ["accelerate", "peft"])
def test_a_search_for_a_name_finds_the_importers_that_summaries_of_all_files_have(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run over one file searches the tree for the module's name, a run over many summarizes all of it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is the sample")
    top = str(Path(spec.origin).parent)
    files = sorted(map(str, Path(top).rglob("*.py")))[::3]

    def users(searches: int) -> dict[str, object]:
        monkeypatch.setattr(summaries, "_MOST_PASSES", searches)
        monkeypatch.setattr(summaries, "_kept", {})
        tracked_fs.clear_run_caches()
        return {file: summaries.answer(top, file, "use ") for file in files}

    by_name, by_summaries = users(len(files) * 4), users(0)
    assert by_name == by_summaries
    assert any(by_name.values()) and None in by_name.values()
