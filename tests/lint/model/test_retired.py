"""Retired codes are accepted wherever a code is, and stand for their successors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mpguard.cli import main
from mpguard.core import settings
from mpguard.lint.model.retired import RETIRED, Retired, explanation
from mpguard.lint.model.rule import rules

TRAIN = """\
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = (model(x.half()) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
CAST = "    loss = (model(x.half()) - y).pow(2).mean()\n"
MERGED, REMOVED = "MPG198", "MPG199"


class Ran(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def mpguard(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*arguments: str) -> Ran:
        status = main(arguments)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def retired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(RETIRED, MERGED, Retired("old-cast", "MPG101", "it is one of its forms"))
    monkeypatch.setitem(RETIRED, REMOVED, Retired("old-idea", None, "it was wrong"))
    monkeypatch.chdir(tmp_path)
    settings._of_folder.cache_clear()
    Path("train.py").write_text(TRAIN)


def codes(ran: Ran) -> list[str]:
    return [line.split()[1] for line in ran.out.splitlines() if line.startswith("train.py")]


def test_no_code_or_name_is_used_again_and_each_successor_is_a_rule() -> None:
    own = rules(own_only=True)
    assert not RETIRED.keys() & own.keys()
    assert not {each.name for each in RETIRED.values()} & {rule.name for rule in own.values()}
    assert {each.successor for each in RETIRED.values() if each.successor} <= own.keys()


def test_select_and_ignore(mpguard: Callable[..., Ran]) -> None:
    plain = codes(mpguard("lint", "--format", "concise", "train.py"))
    assert plain == ["MPG101"]
    for option, left in (
        (["--select", MERGED], ["MPG101"]),
        (["--select", f"{MERGED},{REMOVED}"], ["MPG101"]),
        (["--select", REMOVED], []),
        (["--select", "MPG19"], ["MPG101"]),
        (["--extend-select", MERGED], plain),
        (["--ignore", MERGED], []),
        (["--ignore", REMOVED], plain),
    ):
        for _ in range(2):  # the second run reads its findings from the cache
            ran = mpguard("lint", "--format", "concise", *option, "train.py")
            assert (codes(ran), ran.status) == (left, int(bool(left)))
            named = [code for code in (MERGED, REMOVED) if code.startswith(tuple(option[1].split(",")))]
            assert [line for line in ran.err.splitlines() if "MPG19" in line] == [
                f"mpguard: {option[0]}: {explanation(code)}" for code in named
            ]


def test_settings(mpguard: Callable[..., Ran]) -> None:
    Path("mpguard.toml").write_text(f"select = ['{MERGED}']\n[per-file-ignores]\n'gen/*' = ['{REMOVED}', '{MERGED}']\n")
    Path("gen").mkdir()
    Path("gen/train.py").write_text(TRAIN)
    ran = mpguard("lint", "--format", "concise")
    assert codes(ran) == ["MPG101"] and "gen" not in ran.out
    assert ran.err.count(f"mpguard.toml: {MERGED} (old-cast) is now MPG101") == 1
    assert ran.err.count(f"mpguard.toml: {REMOVED} (old-idea) was removed: it was wrong") == 1


@pytest.mark.parametrize("comment", ["noqa: {}", "mpguard: ignore[{}] reason", "noqa: {}, MPG199"])
def test_a_suppression_covers_the_successor_and_is_not_reported(mpguard: Callable[..., Ran], comment: str) -> None:
    Path("train.py").write_text(TRAIN.replace(CAST, f"{CAST.rstrip()}  # {comment.format(MERGED)}\n"))
    for _ in range(2):
        ran = mpguard("lint", "--format", "concise", "--select", "MPG0,MPG101")
        assert (ran.status, codes(ran)) == (0, [])
        assert f"train.py: a suppression names a retired code: {explanation(MERGED)}" in ran.err


def test_a_suppression_of_a_removed_code_suppresses_nothing(mpguard: Callable[..., Ran]) -> None:
    Path("train.py").write_text(TRAIN.replace(CAST, f"{CAST.rstrip()}  # noqa: {REMOVED}\n"))
    ran = mpguard("lint", "--format", "concise", "--select", "MPG0,MPG101")
    assert codes(ran) == ["MPG101"] and explanation(REMOVED) in ran.err


def test_a_baseline(mpguard: Callable[..., Ran]) -> None:
    select = ("--select", "MPG101")
    mpguard("lint", *select, "--write-baseline", "known.json", "train.py")
    document = json.loads(Path("known.json").read_text())
    (finding,) = document["findings"]
    finding["code"] = MERGED
    document["findings"].append({**finding, "code": REMOVED})
    Path("known.json").write_text(json.dumps(document))
    ran = mpguard("lint", *select, "--baseline", "known.json", "train.py")
    assert ran.status == 0
    assert [line for line in ran.err.splitlines() if "known.json" in line] == [
        f"mpguard: known.json: {explanation(code)}" for code in (MERGED, REMOVED)
    ]


@pytest.mark.parametrize("given", [MERGED, MERGED.lower(), "old-cast"])
def test_rule_shows_the_page_of_the_successor(mpguard: Callable[..., Ran], given: str) -> None:
    ran = mpguard("rule", given)
    assert ran.status == 0 and ran.err == f"mpguard: {explanation(MERGED)}\n"
    assert ran.out.startswith("# manual-half-cast (MPG101)")


def test_rule_says_why_a_rule_was_removed(mpguard: Callable[..., Ran]) -> None:
    ran = mpguard("rule", REMOVED)
    assert (ran.status, ran.out, ran.err) == (0, "", f"mpguard: {explanation(REMOVED)}\n")
    assert json.loads(mpguard("rule", REMOVED, "MPG201", "--format", "json").out)["rules"][0]["code"] == "MPG201"
