"""`explain` says what the real libraries do: 200 generated mixes of sources, without a policy and with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from limits import seconds
from mixes import Mix, generate
from processes import in_fork, run_python

pytest.importorskip("accelerate", reason="the real library runs here")
pytest.importorskip("deepspeed", reason="the real library runs here")
pytest.importorskip("transformers", reason="the real library runs here")

import observe_libraries

from mpguard.core.errors import MpguardError
from mpguard.explain import Explanation, explain, gather
from mpguard.explain.model import Origin
from mpguard.policy import hardware

#: The number of mixes without and with a policy.
STOCK, UNDER_A_POLICY = 120, 80

PROGRAM = Path(observe_libraries.__file__)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: observe_libraries.GPU)


def observed(folders: list[Path], listing: Path) -> list[dict[str, Any]]:
    """Return what the real libraries do in each folder; all in one process."""
    listing.write_text("\n".join(map(str, folders)), encoding="utf-8")
    done = in_fork([PROGRAM, listing], cwd=listing.parent, timeout=seconds(300), program=run_python)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"run"')]
    assert [each.pop("run") for each in found] == [str(folder) for folder in folders], done.stderr[-4000:]
    return found


def explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Explanation | None:
    """Return the explanation of a run; None if a file of it cannot be used."""
    monkeypatch.chdir(folder)
    try:
        return explain(gather([Path("run.sh")], environment={}))
    except MpguardError:
        return None


def differences(found: Explanation | None, seen: dict[str, Any]) -> list[object]:
    """Return the settings in which the libraries differ from the explanation."""
    if found is None or "stopped" in seen:
        return [] if "stopped" in seen and (found is None or found.stops) else [seen.get("stopped"), found]
    if found.stops:
        return [("it does not stop", found.stops)]
    wrong: list[object] = []
    for key, value in seen.items():
        each = found.get(key)
        if each is None or each.value != value:
            wrong.append((key, value, each))
    return wrong


def places(origins: list[Origin]) -> set[tuple[str, int]]:
    return {(origin.file, origin.line) for origin in origins if origin.file is not None and origin.line is not None}


def test_equal_to_the_real_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of the libraries, and what is shadowed or unread has no effect on them.

    For the latter, all of these values are removed, and the libraries run again.
    """
    mixes = [generate(seed, guarded=False) for seed in range(STOCK)]
    mixes += [generate(seed, guarded=True) for seed in range(UNDER_A_POLICY)]
    folders = [tmp_path / str(number) for number in range(len(mixes))]
    for mix, folder in zip(mixes, folders, strict=True):
        mix.write(folder)
    seen = observed(folders, tmp_path / "list")
    found = [explained(folder, monkeypatch) for folder in folders]
    wrong = {
        folder.name: different
        for folder, explanation, each in zip(folders, found, seen, strict=True)
        if (different := differences(explanation, each))
    }
    assert wrong == {}
    stopped = sum("stopped" in each for each in seen)
    assert stopped < len(mixes) / 4, "most of the mixes run"

    reduced: dict[Path, tuple[Mix, dict[str, Any]]] = {}
    for number, explanation in enumerate(found):
        if explanation is not None and not explanation.stops:
            shadowed = [other.origin for each in explanation.settings for other in each.shadowed]
            in_force = places([each.origin for each in explanation.settings])
            removed = places([*shadowed, *(each.origin for each in explanation.unread)]) - in_force
            if removed:
                reduced[tmp_path / f"reduced{number}"] = mixes[number].without(removed), seen[number]
    for folder, (mix, _) in reduced.items():
        mix.write(folder)
    again = observed(list(reduced), tmp_path / "list")
    changed = {
        folder.name: (before, after)
        for (folder, (_, before)), after in zip(reduced.items(), again, strict=True)
        if before != after
    }
    assert changed == {}
    assert len(reduced) > len(mixes) / 3, "the property was tried"
