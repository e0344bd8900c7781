"""Which patches apply: to the installed libraries, by running their programs, and to libraries that have changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import REPOSITORY

from mpguard.core.patches import ADJUSTMENTS, PATCHES, Adjustment, NotHere, Patch
from mpguard.core.tested import DISTRIBUTIONS, TESTED
from mpguard.runtime.patches import fit, table, windows

#: What is obsolete by a test of its behaviour: (patch, a library with which it is). Nothing else may be.
OBSOLETE = {
    "torch.utils.file_baton.FileBaton.try_acquire",
    "transformers.masking_utils.find_packed_sequence_indices",
    "transformers.masking_utils.create_causal_mask",
}


def test_every_patch_does_what_it_is_for_with_the_installed_libraries() -> None:
    """Transformer Engine is installed with a GPU only: there tests/gpu trains with its patch."""
    run = subprocess.run([sys.executable, "-m", "mpguard.runtime.patches.fit"], capture_output=True, text=True)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"patch"')]
    assert len(found) > 50, run.stderr[-2000:]
    outside = {each.name for each in (*PATCHES, *ADJUSTMENTS) if not _is_tested(each)}
    lost = [(each["patch"], each["reason"]) for each in found if each["state"] == fit.LOST]
    lost = [each for each in lost if each[0] not in outside]
    assert not lost, run.stderr[-2000:]
    absent = {each["library"] for each in found if each["state"] == fit.ABSENT}
    assert absent <= {"transformer_engine", "torch"}
    without_gpu = {each["patch"] for each in found if each["reason"] == "there is no GPU"}
    assert without_gpu <= {"aten::_cudnn_rnn under autocast"}, "an RNN under autocast needs cuDNN"
    assert {each.name for each in ADJUSTMENTS} <= {each["patch"] for each in found}
    assert {each["patch"] for each in found if each["state"] == fit.OBSOLETE} <= OBSOLETE


def _is_tested(patch: Patch | Adjustment) -> bool:
    """Return False for a patch of a later version than the installed one: `make test-oldest` has one of those."""
    version = windows.installed_versions().get(DISTRIBUTIONS.get(patch.package, patch.package))
    return version is None or patch.window is None or patch.window.place(version) == "inside"


def test_the_bounds_of_the_extras_are_those_of_the_window() -> None:
    """Each extra requires the oldest version that is tested; torchao is the one that needs a newer torch."""
    text = Path(REPOSITORY, "pyproject.toml").read_text(encoding="utf-8")
    for library, window in TESTED.items():
        name = DISTRIBUTIONS.get(library, library)
        bounds = set(re.findall(rf'"{name}(?:\[pytorch\])?>=([\d.]+)"', text))
        wanted = {window.oldest.removesuffix(".0"), *({"2.11"} if library == "torch" else ())}
        assert bounds == wanted, library


def test_reading_the_files_of_the_installed_libraries_finds_every_target() -> None:
    found = list(fit.read(PATCHES, sys.path))
    found = [each for each in found if _is_tested(each.patch)]
    assert [(each.patch.name, each.reason) for each in found if each.state == fit.LOST] == []
    assert {each.state for each in found} <= {fit.APPLIES, fit.ABSENT}


def test_reading_a_library_that_has_changed(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is not imported')\n")
    (package / "masking_utils.py").write_text(
        "def find_packed_sequence_indices(positions): ...\n"
        "if True:\n    def _ignore_causal_mask_sdpa(padding_mask, q, kv_length, local_attention_size=None): ...\n"
        "from .other import create_causal_mask\n"
    )
    (package / "trainer.py").write_text("class Trainer:\n    pass\n\nclass Other(Trainer):\n    pass\n")
    chosen = [each for each in table.PATCHES if each.package == "transformers"]
    found = {each.patch.target: (each.state, each.reason) for each in fit.read(chosen, [str(tmp_path)])}
    name = "transformers.masking_utils.find_packed_sequence_indices"
    assert found["find_packed_sequence_indices"] == (fit.LOST, f"{name} has no parameter position_ids")
    assert found["_ignore_causal_mask_sdpa"] == (fit.APPLIES, "")
    assert found["create_causal_mask"] == (fit.APPLIES, ""), "imported from elsewhere"
    assert found["create_chunked_causal_mask"][0] == fit.LOST
    missing = "there is no Trainer._save_optimizer_and_scheduler in transformers.trainer"
    assert found["Trainer._save_optimizer_and_scheduler"] == (fit.LOST, missing)
    assert found["_grouped_mm"] == (fit.LOST, "there is no module transformers.integrations.moe")
    assert {each.state for each in fit.read(chosen, [str(tmp_path / "empty")])} == {fit.ABSENT}


def _patch(check: object, *, traced: bool = False) -> Patch:
    def wrap(original: object) -> object:
        return lambda *args: "wrapped"

    return Patch("colorsys", "rgb_to_hsv", ("r",), "reason", "lost", wrap, check, traced=traced)  # type: ignore[arg-type]


def test_a_patch_whose_program_does_not_call_its_target_does_not_apply() -> None:
    import colorsys

    def calls() -> None:
        """Calls it."""
        colorsys.rgb_to_hsv(1, 0, 0)

    def calls_another() -> None:
        """Calls another function."""
        colorsys.hsv_to_rgb(1, 0, 0)

    def fails() -> None:
        """Calls it, and finds another behaviour."""
        assert colorsys.rgb_to_hsv(1, 0, 0) == (0, 0, 0), "another colour"

    states = {}
    for check in (calls, calls_another, fails):
        [states[check.__name__]] = list(fit.behaviours([_patch(check)]))
    assert states["calls"].state == fit.APPLIES
    assert states["calls_another"].reason == "it is not called in: Calls another function."
    assert states["fails"].state == fit.LOST and "another colour" in states["fails"].reason
    assert colorsys.rgb_to_hsv(1, 0, 0) == (0.0, 1.0, 1), "the original is back"


@pytest.mark.parametrize(
    ("needs", "has", "state"),
    [(1, 1, fit.APPLIES), (0, 1, fit.OBSOLETE), (2, 1, fit.LOST), (None, 1, fit.ABSENT)],
)
def test_an_adjustment_is_checked_without_it_and_with_it(needs: int | None, has: int, state: str) -> None:
    made: list[int] = []

    def program() -> None:
        if needs is None:
            raise NotHere("there is no GPU")
        assert len(made) >= needs, "without it"

    each = Adjustment("colorsys", "option", "reason", "lost", lambda _module: made.extend([1] * has), program)
    [found] = fit.adjusted([each])
    assert found.state == state
    reason = {fit.LOST: "AssertionError: without it", fit.ABSENT: "there is no GPU"}.get(state, "")
    assert found.reason.partition("\n")[0] == reason


@pytest.mark.parametrize(("wanted", "state"), [("wrapped", fit.APPLIES), ((0.0, 1.0, 1), fit.OBSOLETE), (1, fit.LOST)])
def test_a_traced_patch_is_obsolete_where_the_library_has_the_behaviour(wanted: object, state: str) -> None:
    import colorsys

    def program() -> None:
        """Has the behaviour."""
        assert colorsys.rgb_to_hsv(1, 0, 0) == wanted

    [found] = fit.behaviours([_patch(program, traced=True)])
    assert found.state == state
