"""`mpguard tune`: the command with real scripts, what it writes, Ctrl-C, and command lines that cannot be used."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from limits import seconds
from paths import PROGRAMS
from processes import command, mp_yaml, started, transcript

from mpguard.cli import main
from mpguard.document import mp_yaml as keys
from mpguard.document import read
from mpguard.policy import hardware
from mpguard.runtime.launch import launcher
from mpguard.targets.capabilities import SLOWER_ALL_GATHER
from mpguard.tune.candidates import CONFIGURED
from mpguard.tune.request import TuneRequest, plan

SCRIPT = PROGRAMS / "tuned.py"
EMULATED = "{mpguard_recipe: bf16_with_fp8_rowwise_mixed, mpguard_overrides: {fp8_emulate: true}}  # slow"


def test_the_winner_is_written_with_its_figures(tmp_path: Path) -> None:
    """Emulated FP8 against compiled BF16, which always takes part."""
    pytest.importorskip("torchao")
    config = mp_yaml(tmp_path, fp8_config=EMULATED, text="# the end\n")
    options = ("--only", CONFIGURED, "--steps", 5, "--warmup", 4, "--rounds", 1, "--format", "json")
    words = ("tune", "--config", config, *options, SCRIPT, "plain")
    run = command("mpguard", *words, cwd=tmp_path, timeout=seconds(300), TORCHINDUCTOR_COMPILE_THREADS="1")
    assert run.returncode == 0, transcript(run)
    data = json.loads(run.stdout)
    assert list(data) == ["version", "candidates", "winner"]
    states = {each["name"]: (each["state"], each["reason"]) for each in data["candidates"]}
    assert states == {CONFIGURED: ("measured", ""), "bf16+compile": ("measured", "")}
    assert all(each["ms"] > 0 and abs(each["loss_gap"]) < 0.1 and each["gib"] > 0 for each in data["candidates"])
    policy, text = keys.load_policy(config), config.read_text()
    if data["winner"] == "bf16+compile":
        assert policy.low_bit_recipe is None and policy.compile is True
        assert "# mpguard tune: " in text and "bf16+compile" in text
    assert text.endswith("# the end\n") and "# slow" in text
    assert "mpguard tune: bf16+compile, run 1: " in run.stderr


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_ctrl_c_prints_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    """Also of a script that ignores signals, and that has started a process in another session."""
    config = mp_yaml(tmp_path)
    before = config.read_text()
    options = ("--only", CONFIGURED, "--steps", 4, "--warmup", 3, "--format", "json")
    words = ("tune", "--config", config, *options, SCRIPT, "plain", "--fault", "hang", "--only-in", "compile")
    with started("mpguard", *words, cwd=tmp_path) as process:
        deadline = time.monotonic() + seconds(120)
        while not (tmp_path / "pids").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=seconds(60))
    assert process.returncode == 130
    configured, compiled = json.loads(output)["candidates"]
    assert configured["state"] == "measured" and configured["ms"] > 0
    assert (compiled["state"], compiled["reason"], json.loads(output)["winner"]) == ("refused", "interrupted", None)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(running, pids)) and config.read_text() == before


def test_the_list_shows_what_cannot_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "detect", hardware.Hardware)
    config = mp_yaml(tmp_path)
    assert main(["tune", "--list", "--config", str(config), "--format", "json", str(SCRIPT), "--format", "x"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["candidates"]}
    assert rows[CONFIGURED] == {"name": CONFIGURED, "overrides": {}, "reason": ""}
    assert rows["bf16+compile"]["reason"] == "" and "no GPU" in rows["te-tensorwise"]["reason"]
    assert main(["tune", "--list", "--config", str(config), "--only", "bf16", "--format", "json", str(SCRIPT)]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["candidates"]]
    assert names == [CONFIGURED, "bf16+compile"], "the config is `bf16` already"
    assert main(["tune", "--list", "--config", str(config), str(SCRIPT)]) == 0
    out = capsys.readouterr().out
    assert "bf16+compile" in out and "runs here" in out and "needs compute capability 8.9" in out


def test_a_demand_that_costs_time_has_its_measured_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float8 all-gather on two GPUs, of the config and of the candidates that have it from there; not as a wish."""
    found = hardware.Hardware("NVIDIA H100", (9, 0), 2, (13, 0), {"torchao": "0.18.0"})
    monkeypatch.setattr(hardware, "detect", lambda: found)
    monkeypatch.setattr(launcher, "has_accelerator", lambda: True)
    for demanded in (True, False):
        overrides = "first_last_layers_bf16: false" + ", fp8_param: true" * demanded
        fp8 = f"{{mpguard_recipe: bf16_with_fp8_current_scaling_mixed, mpguard_overrides: {{{overrides}}}}}"
        config = mp_yaml(
            tmp_path, distributed_type="FSDP", num_processes=2, use_cpu="false", fsdp_config="{fsdp_version: 2}",
            fp8_config=fp8,
        )  # fmt: skip
        chosen = plan(TuneRequest(config, ["--config", str(config), str(SCRIPT)], 1))
        costs = {each.name: each.cost for each in chosen if not each.refused}
        expected = f"fp8_param: true costs time: {SLOWER_ALL_GATHER}" if demanded else ""
        assert costs[CONFIGURED] == expected and costs["bf16+compile"] == ""
        assert main(["tune", "--list", "--config", str(config), str(SCRIPT)]) == 0
        assert ("1.40 times as fast" in " ".join(capsys.readouterr().out.split())) is demanded


@pytest.mark.parametrize(
    ("options", "keys", "message"),
    [
        (["--config", "mp.yaml"], {}, "no script is given; the command is mpguard tune --config mp.yaml SCRIPT"),
        ([str(SCRIPT)], {}, "no --config is given; the command is mpguard tune --config mp.yaml SCRIPT"),
        (["--config", "mp.yaml", "nothing.py"], {}, "nothing.py: there is no such file"),
        (["--config", "no.yaml", str(SCRIPT)], {}, "no.yaml"),
        (["--config", "mp.yaml", "--only", "bf15", str(SCRIPT)], {}, "--only bf15: there is no such candidate"),
        (["--config", "mp.yaml", "--steps", "1", str(SCRIPT)], {}, "--steps 1: 3 or more is needed"),
        (["--config", "mp.yaml", "--rounds", "x", str(SCRIPT)], {}, "argument --rounds: invalid int value: 'x'"),
        (["--config", "mp.yaml", "--time-limit", "0", str(SCRIPT)], {}, "--time-limit 0: a number of seconds above 0"),
        (["--config", "mp.yaml", "--scratch", ".", str(SCRIPT)], {}, "--scratch .: exists, and is not an empty folder"),
        (["--config", "mp.yaml", str(SCRIPT)], {"num_machines": 2}, "is 2; tune starts and ends the processes of one"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned(
    options: list[str], keys: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    mp_yaml(tmp_path, **keys)
    before = read(Path("mp.yaml")).text
    assert main(["tune", *options]) == 2
    assert message in capsys.readouterr().err and Path("mp.yaml").read_text() == before
