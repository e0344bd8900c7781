"""benchmarks/evidence.json: verdicts on findings in published packages, and the page made of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest
from paths import REPOSITORY

from mpguard.lint.model.retired import RETIRED, successor
from mpguard.lint.model.rule import rules

ROOT = REPOSITORY

_spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
assert _spec is not None and _spec.loader is not None
evidence = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(evidence)

VERDICTS = json.loads((ROOT / "benchmarks" / "evidence.json").read_text("utf-8"))


@pytest.mark.parametrize(("name", "page"), [("evidence", evidence.page), ("evidence_rules", evidence.rules_page)])
def test_the_pages_are_what_the_verdicts_say(name: str, page: Callable[[], str]) -> None:
    written = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    assert written == page(), "run `make docs`"
    assert len(written.split()) <= 1500


def test_a_rule_that_never_ran_on_public_code_says_so() -> None:
    measured = evidence._program("corpus").measured()
    for code in rules(own_only=True):
        assert not ("It reported nothing" in evidence.of_rule(code) and code not in measured)
    assert "Not measured yet" in evidence.of_rule("MPG317")
    assert "It reported nothing" in evidence.of_rule("MPG402") or "judged" in evidence.of_rule("MPG402")


def test_each_default_rule_earns_its_place() -> None:
    """It was right twice in public code, or it has an S-number, a public thread, a test, or a reason of its own."""
    assert [code for code, reasons in evidence.places().items() if not reasons] == []
    assert evidence.places()["MPG402"] == ["S19"] and "c12" in evidence.places()["MPG204"]


def test_verdicts_are_whole_and_about_what_there_is() -> None:
    keys = [evidence.key(each) for each in VERDICTS]
    assert len(set(keys)) == len(keys)
    assert {package for package, *_ in keys} <= {package.name for package in evidence.packages()}
    default = {code for code, rule in rules(own_only=True).items() if not rule.preview}
    assert {successor(code) for *_, code in keys} - {None} <= default | evidence._program("corpus").PREVIEW_SINCE.keys()
    assert all(set(each) == {"package", "file", "line", "code", "verdict", "why"} for each in VERDICTS)
    assert all(isinstance(each["verdict"], bool) and len(each["why"]) > 10 for each in VERDICTS)


def test_labels_are_whole_and_what_found_them_are_rules() -> None:
    labels = json.loads((ROOT / "benchmarks" / "labels.json").read_text("utf-8"))["labels"]
    places = [(each["repository"], each["file"], each["line"], each["kind"]) for each in labels]
    assert len(set(places)) == len(places)
    assert {each["sure"] for each in labels} == {"certain", "likely", "debatable"}
    assert {each[when] for each in labels for when in ("first", "last")} - {None} <= rules(own_only=True).keys()
    assert all(len(each["commit"]) == 40 and each["line"] > 0 for each in labels)


def test_there_is_enough_evidence_and_it_speaks_for_the_rules() -> None:
    judged = [each["verdict"] for each in VERDICTS if each["code"] != evidence.FREQUENT]
    assert len(judged) >= 300
    assert sum(judged) / len(judged) >= 0.95


def test_the_unseen_packages_are_others_and_all_are_judged_by_rules_that_there_are() -> None:
    seen = {package.name for package in evidence.packages()}
    for data in json.loads(evidence.UNSEEN.read_text("utf-8"))["batches"]:
        names = {package["name"] for package in data["packages"]}
        assert not names & seen, "rules were changed because of a package of an earlier batch"
        seen |= names
        assert {verdict["package"] for verdict in data["verdicts"]} <= names
        assert all(len(package["sha256"]) == 64 for package in data["packages"])
        assert {verdict["code"] for verdict in data["verdicts"] if not verdict["verdict"]} == set(data["fixed since"])
        assert {verdict["code"] for verdict in data["verdicts"]} <= {*rules(own_only=True), *RETIRED}
        assert all(len(verdict["why"]) > 10 for verdict in data["verdicts"])
