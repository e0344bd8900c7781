"""Every program in examples/ runs with the command in its docstring, for fewer steps, and is proven in force."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from limits import seconds
from paths import REPOSITORY
from processes import command, launch_in_forks, on_ranks, transcript

from mpguard.cli import main

EXAMPLES = REPOSITORY / "examples"

#: Program -> the processes that its mp.yaml or its command asks for.
PROGRAMS = {"torch": 1, "accelerate": 2, "trainer": 2, "deepspeed": 2, "fsdp2": 2}

#: Fewer steps than the command has, in which the loss has come down: the Trainer logs means of ten steps.
STEPS = {"torch": 6, "accelerate": 6, "trainer": 12, "deepspeed": 6, "fsdp2": 6}

#: Those of which the workers are forks, as importing takes them longer than training. Others start the same launchers.
IN_FORKS = ("trainer", "deepspeed")


def command_of(program: Path) -> list[str]:
    """The command in a program's docstring."""
    found = re.search(r"^ *((?:mpguard launch|torchrun) .*)$", program.read_text(encoding="utf-8"), re.M)
    assert found is not None, f"{program} has no command in its docstring"
    return found[1].split()


def run(launcher: str, *words: str, forks: bool) -> subprocess.CompletedProcess[str]:
    """Run a command line in the repository."""
    options: Any = {"cwd": REPOSITORY, "timeout": seconds(300), "CUDA_VISIBLE_DEVICES": ""}
    if not forks:
        return command(launcher, *words, **options)
    if launcher == "mpguard":
        assert words[0] == "launch"
        return launch_in_forks(*words[1:], **options)
    assert words[:2] == ("--nproc_per_node", "2")
    return on_ranks(*words[2:], processes=2, **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_trains_and_is_proven(name: str) -> None:
    pytest.importorskip("accelerate", reason="the real library runs here")
    words = (*command_of(EXAMPLES / f"train_{name}.py"), "--steps", str(STEPS[name]))
    done = run(*words, forks=name in IN_FORKS)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    ranks = "1 process" if PROGRAMS[name] == 1 else f"all {PROGRAMS[name]} ranks"
    assert f"step 1 proven in force on {ranks} · recipe bf16_mixed" in output
    losses = [float(loss) for loss in re.findall(r"loss'?:? *'?(\d+\.\d+)", output)]
    assert losses[-1] < min(5.0, losses[0]), f"a uniform guess is 5.55, the loss went {losses}"


def test_the_readme_shows_what_a_launch_prints(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the real library runs here")
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    ((shown, init, script, words),) = re.findall(
        r"\$ (?=mpguard init)((mpguard init .*)\n\$ mpguard launch --config mp.yaml (\S+)( .*)\n(?:.+\n)+?)```", readme
    )
    assert main([*init.split()[1:-1], str(tmp_path / "mp.yaml")]) == 0
    launch = ("launch", "--config", "mp.yaml", REPOSITORY / script, *words.split())
    done = command("mpguard", *launch, cwd=tmp_path, timeout=seconds(300), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, transcript(done)
    version = re.compile(r"mpguard \d\S*")
    printed = set(re.sub(version, "mpguard VERSION", done.stdout + done.stderr).splitlines())
    *lines, last = [re.sub(version, "mpguard VERSION", line) for line in shown.splitlines()[2:]]
    assert len(lines) > 10 and [line for line in lines if "loss" not in line and line not in printed] == []
    assert last == "in force at steps 1-16 of 20 (5 checks)", "a busy machine checks less often"
    assert any(re.fullmatch(r"in force at steps? 1.* of 20 \(.*\)", line) for line in printed)
    found = dict(re.findall(r"step +(\d+)  loss (\S+)", "\n".join(printed)))
    for step, loss in re.findall(r"step +(\d+)  loss (\S+)", shown):
        assert float(found[step]) == pytest.approx(float(loss), abs=0.05), "processors round BF16 differently"


def test_deepspeed_at_another_stage(tmp_path: Path) -> None:
    """With the two files that `mpguard init` writes; with mp.yaml alone, what the script asks for is another engine."""
    pytest.importorskip("deepspeed", reason="the real library runs here")
    config = tmp_path / "mp.yaml"
    assert main(["init", "bf16_mixed", "--strategy", "deepspeed-zero3", "--num-processes", "2", "--batch-size", "1",
                 "-o", str(config)]) == 0  # fmt: skip
    words = ("-m", "mpguard.run", "--config", config, EXAMPLES / "train_deepspeed.py", "--steps", "2")
    alone, together = (on_ranks(*words, *more, cwd=tmp_path, timeout=seconds(300))
                       for more in ((), ("--deepspeed_config", tmp_path / "ds_config.json")))  # fmt: skip
    refused = "engine: deepspeed-zero2; asked: deepspeed-zero3"
    assert alone.returncode == 1 and refused in alone.stderr, transcript(alone)
    assert together.returncode == 0 and "proven in force on all 2 ranks" in together.stderr, transcript(together)


def test_the_mistakes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--format", "json", str(EXAMPLES / "mistakes")]) == 1
    found = {(Path(each["path"]).name, each["code"]) for each in json.loads(capsys.readouterr().out)["findings"]}
    assert {
        ("train.py", "MPG101"), ("train.py", "MPG201"), ("train.py", "MPG302"), ("train.py", "MPG401"),
        ("finetune.py", "MPG203"), ("mp.yaml", "MPG801"), ("mp.yaml", "MPG811"),
    } <= found  # fmt: skip


def test_the_other_examples_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for pattern in ("*.py", "*.yaml", "*.json") for path in sorted(EXAMPLES.glob(pattern))]
    assert len(files) > 10
    assert main(["lint", *files]) == 0, capsys.readouterr().out
