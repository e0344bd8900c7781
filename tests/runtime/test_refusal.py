"""After a refusal: a session goes on, a script that catches it ends with status 1, and `warn` ends with a line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import in_fork, proof, run_file, transcript
from short_programs import HEAD, run

#: What a session defines first. `cell` runs as a notebook does: an exception is shown, and the session goes on.
SESSION = """
import mpguard
mpguard.activate("bf16_mixed", proof_json="proof.json")
def build():
    m = net(); return m, adam(m)
def cell(name, **autocast):
    try: train(*build(), **autocast)
    except mpguard.NotInForce as error: print(f"{name}: {error.verdict}: {error}")
    else: print(f"{name}: done")
"""


def session(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that activates its policy itself."""
    (folder / "t.py").write_text(HEAD + SESSION + script)
    return in_fork([folder / "t.py"], cwd=folder, program=run_file)


def test_the_next_cell_is_proven_and_the_process_is_still_refused(tmp_path: Path) -> None:
    run = session(tmp_path, "cell('first', enabled=False); cell('second'); cell('third', enabled=False)")
    assert "first: not in force: compute: fp32; asked: bf16" in run.stdout, transcript(run)
    assert "second: done\nthird: not in force: compute: fp32; asked: bf16" in run.stdout, transcript(run)
    assert run.stderr.count("step 1 proven in force on 1 process") == 1
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("mpguard: not in force: compute: fp32")
    assert proof(tmp_path / "proof.json")["verdict"] == "not in force", "that of a later training does not replace it"


def test_activate_withdraws_a_refusal(tmp_path: Path) -> None:
    script = "cell('first', enabled=False); mpguard.activate('bf16_mixed'); cell('second')"
    run = session(tmp_path, script)
    assert run.returncode == 0 and "second: done" in run.stdout, transcript(run)
    assert "in force at steps 1-2 of 3" in run.stderr.splitlines()[-1]
    assert proof(tmp_path / "proof.json")["verdict"] == "in force"


def test_the_refused_optimizer_stays_refused(tmp_path: Path) -> None:
    """Also after `activate`, and with the right autocast: its weights were trained wrongly."""
    script = (
        "m, o = build()\n"
        "for words in ({'enabled': False}, {}):\n"
        "    try: train(m, o, **words)\n"
        "    except mpguard.NotInForce as error: print(error)\n"
        "    mpguard.activate('bf16_mixed'); build()\n"
        "cell('new')\n"
    )
    run = session(tmp_path, script)
    assert run.stdout.count("compute: fp32; asked: bf16") == 2 and "new: done" in run.stdout, transcript(run)
    assert "refused before, and is not stepped again" in run.stdout
    assert "call mpguard.activate(), then build a new model and a new optimizer" in run.stdout


def test_a_script_that_swallows_every_refusal_ends_with_status_1(tmp_path: Path) -> None:
    script = "for _ in range(3): cell('wrong', enabled=False)\ncell('right')"
    run = session(tmp_path, script)
    assert run.returncode == 1 and run.stdout.count("wrong: not in force: ") == 3, transcript(run)
    assert run.stderr.count("mpguard: not in force") == 1


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "m = net(); train(m, adam(m), enabled=False)",
            "mpguard: the run was not in force and continued (--enforce): compute: fp32; asked: bf16",
        ),
        (
            "m = net(); o = adam(m); train(m, o, 1); train(m, o, 5, enabled=False)",
            "mpguard: the run was not in force and continued (--enforce): step 2: compute: fp32; asked: bf16",
        ),
    ],
)
def test_a_run_that_continues_ends_with_a_line(tmp_path: Path, script: str, line: str) -> None:
    ended = run(tmp_path, script, "--enforce", "warn")
    assert ended.returncode == 0 and ended.stderr.splitlines()[-1].startswith(line), transcript(ended)


def test_a_right_run_under_warn_ends_with_its_own_line(tmp_path: Path) -> None:
    ended = run(tmp_path, "m = net(); train(m, adam(m))", "--enforce", "warn")
    assert "the run was" not in ended.stderr and "in force at steps 1-2 of 3" in ended.stderr, transcript(ended)
