"""Show what mpguard does, on this machine: `make demo` runs it.

Lints scripts with mistakes; writes an mp.yaml from a recipe; trains a small GPT on the source of Python's
standard library with two processes, with BF16 enforced and proven; and shows a run that the stock
launcher degrades without a message, and that mpguard refuses. Needs no GPU (and uses none).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
FOLDER = EXAMPLES.parent / "demo-run"
BIN = Path(sys.executable).parent

#: The processes of a run share the cores, so each gets one thread.
ENVIRONMENT = os.environ | {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

FSDP_WITHOUT_GPU = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
mixed_precision: bf16
num_machines: 1
num_processes: 1
fsdp_config:
  fsdp_version: 2
fp8_config:
  mpguard_recipe: bf16_mixed
"""

started = time.monotonic()


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def run(command: str, expected: int) -> None:
    """Run a command as a user types it; exit if its exit status is not the expected one."""
    print(f"$ {command}", flush=True)
    status = subprocess.run(shlex.split(command), cwd=EXAMPLES.parent, env=ENVIRONMENT, check=False).returncode
    print(f"[exit status {status}, {time.monotonic() - started:.0f} s since the start]", flush=True)
    if status != expected:
        sys.exit(f"demo: the exit status of `{command}` was {status}; {expected} was expected")


def main() -> None:
    hook = subprocess.run(["mpguard", "hook", "status"], env=ENVIRONMENT, capture_output=True, check=False)
    if hook.returncode == 0:
        sys.exit("demo: with the hook no launcher is a stock one. Run `mpguard hook uninstall` first")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()

    title("1. Mistakes are found before a GPU is rented")
    run("mpguard lint examples/mistakes", expected=1)

    title("2. Precision is declared once")
    run("mpguard init bf16_mixed --strategy ddp --num-processes 2 -o demo-run/mp.yaml", expected=0)

    title("3. A GPT trains with two processes, and what runs is compared with the policy")
    run("mpguard launch --config demo-run/mp.yaml examples/train_accelerate.py --steps 20", expected=0)

    title("4. The stock launcher: the same file, two processes in the config, one is started, without a message")
    run("accelerate launch --config_file demo-run/mp.yaml examples/train_accelerate.py --steps 1", expected=0)

    title("5. FSDP on a machine where it is never applied: the stock launcher trains nevertheless")
    (FOLDER / "fsdp.yaml").write_text(FSDP_WITHOUT_GPU, encoding="utf-8")
    run("accelerate launch --config_file demo-run/fsdp.yaml examples/train_accelerate.py --steps 1", expected=0)

    title("6. mpguard refuses that run")
    run("mpguard launch --config demo-run/fsdp.yaml examples/train_accelerate.py --steps 1", expected=1)

    title(f"Done in {time.monotonic() - started:.0f} s. The files are in {FOLDER.name}/, the programs in examples/.")


if __name__ == "__main__":
    main()
