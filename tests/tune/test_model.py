"""Step times, losses, the winner, and the candidates."""

from __future__ import annotations

import json
import math

import pytest
from paths import REPOSITORY

from mpguard.policy import hardware
from mpguard.policy.recipes import recipe
from mpguard.tune.candidates import CONFIGURED, TABLE, TuneCandidate, candidates
from mpguard.tune.model import TrialResult, TuneReport, TuneRow, broken_loss, loss_gap, step_time
from mpguard.tune.search import search


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", hardware.Hardware)


def row(name: str, ms: float, *, loss: float = 2.0, fp8: bool = False, changed: int = 0, trials: int = 2) -> TuneRow:
    policy = recipe("bf16_with_fp8_rowwise_mixed" if fp8 else "bf16_mixed")
    overrides = {str(number): True for number in range(changed)}
    losses = tuple(loss + 0.001 * step for step in range(20))
    result = TrialResult("measured", "", tuple(ms + 0.01 * step for step in range(20)), losses, 2**30)
    return TuneRow(TuneCandidate(name, overrides, policy), [result] * trials)


def winner(*rows: TuneRow) -> str | None:
    found = TuneReport(list(rows)).winner
    return found.candidate.name if found is not None else None


def test_the_interval_has_the_scatter_of_steps_and_of_runs() -> None:
    calm, scattered = step_time([[10.0] * 20]), step_time([[9.0, 11.0] * 10])
    again = step_time([[10.0] * 20, [10.0] * 20, [10.0] * 20])
    apart = step_time([[10.0] * 20, [12.0] * 20])
    assert calm and scattered and again and apart
    assert (calm.ms, apart.ms) == (10.0, 11.0)
    assert again.high - again.low < calm.high - calm.low < scattered.high - scattered.low < apart.high - apart.low
    outlier = step_time([[10.0] * 19 + [1000.0]])
    assert outlier == calm, "a step in which a checkpoint is saved does not count"
    short = step_time([[1.0, 20.0, 2.0]])
    assert short and short.low == 0.0, "no step takes less than no time"
    assert step_time([]) is None and step_time([()]) is None


def test_the_winner_is_the_fastest_and_of_equals_the_one_that_changes_least() -> None:
    bf16 = row("bf16", 10.0, changed=1)
    assert winner(bf16, row("fp8", 8.0, fp8=True, changed=3)) == "fp8"
    assert winner(bf16, row("fp8", 9.95, fp8=True, changed=3)) == "bf16"
    assert winner(bf16, row("fp8", 11.0, fp8=True, changed=3)) == "bf16"
    assert winner(row("configured", 10.05), bf16) == "configured"
    assert winner(bf16, row("graphs", 9.95, changed=1)) == "graphs", "the faster one of those that change equally much"
    failed = TuneRow(bf16.candidate, [TrialResult("failed", "boom")])
    assert winner(failed) is None and winner(failed, row("fp8", 11.0, fp8=True)) == "fp8"


def test_a_broken_loss_does_not_win() -> None:
    bf16, near = row("bf16", 10.0), row("fp8", 8.0, fp8=True, loss=2.02)
    assert loss_gap(near, bf16) == pytest.approx(0.01, abs=0.001) and not broken_loss(near, bf16)
    far, lost = row("fp8", 8.0, fp8=True, loss=2.5), row("fp8", 8.0, fp8=True, loss=math.nan)
    assert broken_loss(far, bf16) == "its loss is 25% above that of BF16 on the same steps"
    assert broken_loss(lost, bf16) == "its loss is not finite, that of BF16 is"
    for each in (far, lost):
        assert winner(bf16, each) == "bf16"
    assert winner(row("bf16", 10.0, loss=math.nan), lost) == "fp8", "the script's own loss is not finite"
    unseen = TuneRow(near.candidate, [TrialResult("measured", "", (8.0,) * 20, (None,) * 20)])
    assert loss_gap(unseen, bf16) is None and winner(bf16, unseen) == "fp8"


def test_json() -> None:
    report = TuneReport(
        [row("bf16", 10.0), row("fp8", 8.0, fp8=True, changed=2), row("x", 8.0, fp8=True, loss=math.nan)]
    )
    report.rows += [TuneRow(TuneCandidate("te", {"backend": "te"}, None, "needs a GPU"))]
    report.rows += [TuneRow(report.rows[1].candidate, [TrialResult("failed", "out of memory: x")])]
    data = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert list(data) == ["version", "candidates", "winner"] and (data["version"], data["winner"]) == (1, "fp8")
    keys = ["name", "overrides", "ms", "interval", "gib", "loss_gap", "state", "reason"]
    assert all(list(each) == keys for each in data["candidates"])
    first, second, lost, refused, failed = data["candidates"]
    assert first["ms"] == pytest.approx(10.095) and first["interval"][0] < 10.095 < first["interval"][1]
    assert (first["gib"], first["loss_gap"], first["reason"]) == (1.0, 0.0, "") and second["overrides"] == {
        "0": True,
        "1": True,
    }
    assert (lost["state"], lost["loss_gap"]) == ("measured", None) and "not finite" in lost["reason"]
    for each, state, reason in ((refused, "refused", "needs a GPU"), (failed, "failed", "out of memory: x")):
        assert (each["state"], each["reason"], each["ms"], each["interval"], each["gib"]) == (
            state,
            reason,
            None,
            None,
            None,
        )


def test_every_row_of_the_table_is_a_policy_or_says_why_not() -> None:
    """Of a BF16 recipe each row is a policy that differs from it in its overrides only."""
    configured = recipe("bf16_mixed").replace(fp32_modules=("*norm*",))
    found = list(candidates(configured))
    assert [each.name for each in found] == [CONFIGURED, *(each.name for each in TABLE if each.name != "bf16")]
    for each in found:
        assert each.policy is not None and each.policy == configured.replace(**each.overrides)
        assert each.policy.fp32_modules == ("*norm*",) and not each.refused
        assert each.base in ("", *(other.name for other in found))
    compiled = next(each for each in found if each.name == "bf16+compile")
    assert compiled.overrides == {"compile": True}


@pytest.mark.parametrize("name", ["fp32", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_nvfp4_mixed"])
def test_bf16_compiled_is_always_among_the_candidates(name: str) -> None:
    found = {each.name: each for each in candidates(recipe(name))}
    policy = found["bf16+compile"].policy
    assert policy is not None and policy.bf16 and policy.low_bit_recipe is None and policy.compile is True
    fp8 = found["torchao-tensorwise+compile"].policy
    assert fp8 is not None and fp8.fp16 is (name == "fp16_mixed") and fp8.low_bit_recipe == "tensorwise"


def test_rows_that_contradict_the_config_are_refused() -> None:
    configured = recipe("bf16_with_fp8_rowwise_mixed").replace(fp8_emulate=True)
    found = {each.name: each for each in candidates(configured)}
    assert "only torchao emulates FP8" in found["te-tensorwise"].refused and found["te-tensorwise"].policy is None
    assert found["torchao-rowwise+compile"].overrides == {"backend": "torchao", "compile": True}


def test_a_script_that_fails_in_bf16_is_not_started_in_fp8() -> None:
    chosen = [each for each in candidates(recipe("bf16_mixed")) if not each.refused]
    started: list[str] = []

    def measure(candidate: TuneCandidate, _number: int) -> TrialResult:
        started.append(candidate.name)
        return TrialResult("failed", "exit status 1: KeyError: 'x'")

    report = TuneReport([TuneRow(each) for each in chosen])
    search(report, measure, 3)
    assert started == [CONFIGURED, "bf16+compile"] and report.winner is None
    assert {each.reason for each in report.rows[2:]} == {"not started: the script fails without FP8 as well"}


def test_the_page_has_each_candidate() -> None:
    page = (REPOSITORY / "docs" / "tune.md").read_text(encoding="utf-8")
    for variant in TABLE:
        line = next(line for line in page.splitlines() if line.startswith(f"| `{variant.name}` |"))
        assert all(f"`{name}: " in line for name in variant.fields)
