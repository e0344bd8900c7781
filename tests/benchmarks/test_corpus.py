"""benchmarks/corpus.py: the list of repositories, its halves, the drawn sample and the verdicts on it."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from paths import REPOSITORY

from mpguard.lint.model.retired import RETIRED
from mpguard.lint.model.rule import rules

_spec = importlib.util.spec_from_file_location("corpus", REPOSITORY / "benchmarks" / "corpus.py")
assert _spec is not None and _spec.loader is not None
corpus = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(corpus)


def finding(repository: str, line: int, code: str = "MPG201") -> dict[str, Any]:
    return {"repository": repository, "path": "train.py", "line": line, "code": code, "message": ""}


def test_the_list_names_each_repository_once_at_a_commit_and_both_halves_are_large() -> None:
    listed = corpus.repositories()
    assert len({each.name.lower() for each in listed}) == len(listed) >= 400
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", each.name) for each in listed)
    assert all(re.fullmatch("[0-9a-f]{40}", each.commit) for each in listed)
    assert min(sum(each.half == half for each in listed) for half in ("open", "held-out")) >= 180


def test_the_half_depends_on_the_name_alone() -> None:
    assert corpus.half("facebookresearch/mae") == corpus.Repository("facebookresearch/mae", "0" * 40).half
    assert {corpus.half(f"owner/{i}") for i in range(20)} == {"open", "held-out"}


def test_the_sample_takes_each_repository_once_before_any_twice_and_does_not_move() -> None:
    many = [finding("a/a", line) for line in range(50)] + [finding(f"b/{i}", 1) for i in range(4)]
    sample = corpus.drawn(many, 5)
    assert sorted(each["repository"] for each in sample) == ["a/a", "b/0", "b/1", "b/2", "b/3"]
    assert corpus.drawn(reversed(many), 5) == sample
    other = [*many, finding("c/c", 1, "MPG205")]
    assert [each for each in corpus.drawn(other, 5) if each["code"] == "MPG201"] == sample


@pytest.mark.parametrize(
    ("right", "judged", "low", "high"), [(20, 20, 0.839, 1.0), (0, 5, 0.0, 0.434), (90, 100, 0.826, 0.945)]
)
def test_the_interval_is_wilsons(right: int, judged: int, low: float, high: float) -> None:
    assert corpus.wilson(right, judged) == pytest.approx((low, high), abs=0.001)


def test_verdicts_are_on_listed_repositories_and_rules_that_there_are() -> None:
    halves = {each.name: each.half for each in corpus.repositories()}
    for batch in corpus.batches():
        keys = [corpus.key(each) for each in batch["verdicts"]]
        assert len(set(keys)) == len(keys)
        answers = {frozenset(set(each) - {"repository", "path", "line", "code", "why"}) for each in batch["verdicts"]}
        assert answers <= {frozenset({"verdict"}), frozenset(corpus.ANSWERS)} and len(answers) <= 1
        assert all(batch["half"] in ("all", halves[each["repository"]]) for each in batch["verdicts"])
        assert (
            {each["code"] for each in batch["verdicts"]} <= set(batch["findings"]) <= {*rules(own_only=True), *RETIRED}
        )
        assert all(isinstance(each["verdict"], bool) for each in batch["verdicts"])
    for batch in corpus.batches()[-corpus.LATEST :]:
        assert all(len(each["why"]) > 10 for each in batch["verdicts"])
