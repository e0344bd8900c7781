"""The hook for `accelerate launch --config mp.yaml`, in a temporary environment that uses this one's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from limits import seconds
from paths import PROGRAMS, REPOSITORY
from processes import environment, mp_yaml, results, transcript

from mpguard.cli import hook
from mpguard.runtime.launch.startup_hook import launch_arguments, program

SCRIPT = PROGRAMS / "accelerated.py"
ROOT = REPOSITORY


#: A line that differs from the one that is written now.
EARLIER_LINE = hook.LINE.replace("mpguard.runtime.launch.startup_hook", "mpguard.runtime.hooked")


class Environment:
    """A virtual environment, and the programs in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.site = Path(self.output("-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        self.hook = self.site / hook.NAME
        self.borrowed = self.site / "_borrowed.pth"
        self.borrow(True)
        self.script("accelerate", "accelerate.commands.accelerate_cli")
        self.script("accelerate-launch", "accelerate.commands.launch")
        self.script("mpguard", "mpguard.cli")

    def script(self, name: str, module: str) -> None:
        """Write a console script as installers do."""
        path = self.bin / name
        path.write_text(f"#!{self.bin / 'python'}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        path.chmod(0o755)

    def borrow(self, mpguard: bool) -> None:
        """Add the packages of this process: paths only, so that none of their .pth files runs."""
        paths = [sysconfig.get_path("purelib"), *((str(ROOT), str(ROOT / "plugins")) if mpguard else ())]
        self.borrowed.write_text("\n".join(paths) + "\n")

    def run(self, *words: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = map(str, words)
        return subprocess.run(
            [str(self.bin / program), *arguments], cwd=cwd, env=environment(**more),
            capture_output=True, text=True, timeout=seconds(120), check=False,
        )  # fmt: skip

    def output(self, *words: object, **more: str) -> str:
        return subprocess.run(
            [str(self.bin / "python"), *map(str, words)],
            env=environment(**more),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()


#: What a script of recipe bf16_mixed gets.
POLICY = '{"name": "bf16_mixed", "bf16": true}'


def light(folder: Path) -> Path:
    """Write a script that prints its arguments and policy, and imports no torch."""
    path = folder / "light.py"
    path.write_text("import os, sys\nprint(sys.argv[1:], os.environ.get('MPGUARD_POLICY'))\n")
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    pytest.importorskip("accelerate", reason="the real library runs here")
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def hooked(bare: Environment, tmp_path: Path) -> Iterator[Environment]:
    run = bare.run("mpguard", "hook", "install", cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    yield bare
    bare.hook.unlink(missing_ok=True)
    bare.borrow(True)


def test_install_prints_what_it_writes_and_uninstall_removes_it(bare: Environment, tmp_path: Path) -> None:
    before = {path.name for path in bare.site.iterdir()}
    assert bare.run("mpguard", "hook", "status", cwd=tmp_path).returncode == 1
    installed = bare.run("mpguard", "hook", "install", cwd=tmp_path)
    assert installed.returncode == 0 and str(bare.hook) in installed.stdout, transcript(installed)
    assert bare.hook.read_text() == hook.LINE and hook.LINE.strip() in installed.stdout
    assert {path.name for path in bare.site.iterdir()} - before == {hook.NAME}
    status = bare.run("mpguard", "hook", "status", "--format", "json", cwd=tmp_path)
    assert json.loads(status.stdout) == {
        "version": 1, "installed": True, "works": True, "files": [{"path": str(bare.hook), "current": True}],
    }  # fmt: skip
    assert bare.run("mpguard", "hook", "uninstall", cwd=tmp_path).returncode == 0
    assert {path.name for path in bare.site.iterdir()} == before


def test_a_line_of_an_earlier_version_is_reported_and_replaced(bare: Environment, tmp_path: Path) -> None:
    assert EARLIER_LINE != hook.LINE
    bare.hook.write_text(EARLIER_LINE)
    status = bare.run("mpguard", "hook", "status", cwd=tmp_path)
    assert status.returncode == 1 and f"Outdated: {bare.hook}: " in status.stdout, transcript(status)
    assert "Run `mpguard hook install`\n" in status.stdout
    installed = bare.run("mpguard", "hook", "install", cwd=tmp_path)
    assert installed.returncode == 0 and "Replaced the line of an earlier version" in installed.stdout
    assert bare.hook.read_text() == hook.LINE
    assert bare.run("mpguard", "hook", "status", cwd=tmp_path).returncode == 0
    bare.hook.unlink()


def test_a_line_without_effect_is_reported(bare: Environment, tmp_path: Path) -> None:
    bare.hook.write_text("import mpguard_of_the_future\n")
    status = bare.run("mpguard", "hook", "status", cwd=tmp_path)
    bare.hook.unlink()
    assert status.returncode == 1 and "Outdated: " in status.stdout and "no effect" in status.stdout, transcript(status)


def test_the_hook_imports_no_patches(bare: Environment) -> None:
    """Patches would import the policy, the proof and the plugins at every interpreter start."""
    names = "sorted(name for name in sys.modules if name.startswith('mpguard.runtime.'))"
    loaded = bare.output("-c", f"import mpguard.runtime.launch.startup_hook, sys; print(*{names})")
    assert loaded.split() == [
        "mpguard.runtime.launch", "mpguard.runtime.launch.startup_hook",
        "mpguard.runtime.patches", "mpguard.runtime.patches.import_hooks",
    ]  # fmt: skip


def test_accelerate_launch_puts_the_policy_in_force_in_each_process_of_the_config(
    hooked: Environment, tmp_path: Path
) -> None:
    mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    run = hooked.run("accelerate", "launch", "--config", "mp.yaml", SCRIPT, "--lr", "0.01", cwd=tmp_path)
    assert run.returncode == 0 and [found["world"] for found in results(run)] == [2, 2], transcript(run)
    for found in results(run):
        assert found["arguments"] == ["--lr", "0.01"] and found["compute"] == "torch.bfloat16"
    assert run.stderr.count("recipe bf16_mixed") == 2 and "proven in force on all 2 ranks" in run.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("python", "-m", "accelerate.commands.launch", "--config=mp.yaml"),
        ("accelerate", "launch", "--config_file", "mp.yaml"),
        ("accelerate-launch", "--num_cpu_threads_per_process", "1", "--config", "mp.yaml"),
    ],
)
def test_other_forms_hand_the_policy_to_the_script(hooked: Environment, tmp_path: Path, words: tuple[str, ...]) -> None:
    mp_yaml(tmp_path)
    run = hooked.run(*words, light(tmp_path), "--lr", "0.01", cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert run.stdout == f"['--lr', '0.01'] {POLICY}\n"
    assert run.stderr.startswith("mpguard ") and "recipe bf16_mixed" in run.stderr


def test_accelerate_launch_refuses_what_mpguard_launch_refuses(hooked: Environment, tmp_path: Path) -> None:
    mp_yaml(tmp_path, distributed_type="FSDP")
    run = hooked.run("accelerate", "launch", "--config", "mp.yaml", SCRIPT, cwd=tmp_path)
    assert run.returncode == 1 and "mpguard: not in force: mp.yaml asks for FSDP" in run.stderr, transcript(run)
    run = hooked.run("accelerate", "launch", SCRIPT, "--config", "mp.yaml", cwd=tmp_path)
    assert run.returncode == 1 and "comes after" in run.stderr and results(run) == [], transcript(run)


def test_a_worker_that_is_not_in_force_ends_the_run(hooked: Environment, tmp_path: Path) -> None:
    mp_yaml(tmp_path, recipe="bf16_full", mixed_precision="'no'")
    run = hooked.run("accelerate", "launch", "--config", "mp.yaml", SCRIPT, cwd=tmp_path)
    assert run.returncode != 0 and results(run) == [], transcript(run)
    assert "mpguard: not in force: " in run.stderr and "parameters: fp32" in run.stderr


def test_a_crash_of_a_worker_gets_its_cause(hooked: Environment, tmp_path: Path) -> None:
    mp_yaml(tmp_path)
    script = "import torch\nlayer = torch.nn.Linear(4, 4).bfloat16()\nlayer(torch.ones(1, 4))\n"
    (tmp_path / "crash.py").write_text(script)
    run = hooked.run("accelerate", "launch", "--config", "mp.yaml", "crash.py", cwd=tmp_path)
    assert run.returncode == 1 and "must have the same dtype" in run.stderr, transcript(run)
    assert "mpguard: the model (Linear): weight bf16, bias bf16; inputs input fp32" in run.stderr, transcript(run)


def test_a_worker_that_ends_unproven_fails(hooked: Environment, tmp_path: Path) -> None:
    run = hooked.run(
        "python", PROGRAMS / "scripted.py", "--backward-only", cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}'
    )
    assert run.returncode == 1 and "finished" in run.stdout and "mpguard: not proven" in run.stderr, transcript(run)


def test_without_an_mp_yaml_nothing_changes(hooked: Environment, tmp_path: Path) -> None:
    modules = "import sys; print([name for name in sys.modules if name.startswith('mpguard')])"
    assert hooked.output("-c", modules) == "[]"
    (tmp_path / "accelerate").write_text(
        "import sys\nprint([n for n in sys.modules if n.startswith('mpguard.runtime.g')])\n"
    )
    assert hooked.output(tmp_path / "accelerate") == "[]"
    stock = mp_yaml(tmp_path, "stock.yaml", recipe=None)
    run = hooked.run("accelerate", "launch", "--config_file", stock, light(tmp_path), cwd=tmp_path)
    assert run.returncode == 0 and run.stdout == "[] None\n" and "mpguard" not in run.stderr, transcript(run)
    run = hooked.run("accelerate", "launch", "--config", stock, light(tmp_path), cwd=tmp_path)
    assert run.returncode == 2 and "unrecognized arguments: --config" in run.stderr, "accelerate's own refusal"


def test_a_missing_mpguard_is_no_error(hooked: Environment, tmp_path: Path) -> None:
    hooked.borrow(False)
    run = hooked.run("python", "-c", "print('started')", cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert (run.returncode, run.stdout, run.stderr) == (0, "started\n", "")


def test_read_only_environments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the test may run as root
    with pytest.raises(hook.ConfigError, match="is read-only"):
        hook._require_writable(tmp_path, user=False)


def test_externally_managed_pythons_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(hook.ConfigError, match="externally managed"):
        hook._require_writable(tmp_path, user=False)


def test_the_user_site_of_a_virtual_environment_is_refused(bare: Environment, tmp_path: Path) -> None:
    run = bare.run("mpguard", "hook", "install", "--user", cwd=tmp_path)
    assert run.returncode == 2 and "leave out --user" in run.stderr, transcript(run)


@pytest.mark.parametrize(
    ("argv", "begin"),
    [
        (["python", "/bin/accelerate", "launch", "x"], 3),
        (["python", "-u", "-X", "dev", "/bin/accelerate", "launch"], 6),
        (["python", "/bin/accelerate-launch", "x"], 2),
        (["python", "-m", "accelerate.commands.launch", "x"], 3),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch"], 4),
        (["python", "/bin/accelerate", "env"], None),
        (["python", "train.py", "accelerate", "launch"], None),
        (["python", "-c", "accelerate", "launch"], None),
        (["python", "-m", "pytest", "accelerate.commands.launch"], None),
        (["python"], None),
    ],
)
def test_only_accelerates_launcher_is_recognized(argv: list[str], begin: int | None) -> None:
    assert launch_arguments(argv) == begin


def test_the_program_is_found_after_the_interpreters_options() -> None:
    assert program(["python", "-u", "-W", "error", "/bin/torchrun", "-m", "x"]) == ("torchrun", 5)
    assert program(["python", "-Im", "x"])[0] == "x"
    assert program(["python", "-um", "torch.distributed.run"])[0] == "torch.distributed.run"
    assert program(["python", "-"])[0] == "" and program(["python", "-c", "1", "accelerate"])[0] == ""
