"""The module that the line in `mpguard_hook.pth` imports, in processes that may need it only.

In the launcher, the arguments of `accelerate launch --config mp.yaml` are rewritten after accelerate's
parser has been imported and before it reads them. In the workers, which inherit `MPGUARD_POLICY`, the
policy is activated. Both wait until the libraries are imported; nothing is imported here at interpreter start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from mpguard.runtime.patches import import_hooks

LAUNCHER = "accelerate.commands.launch"

#: Programs that import torch and do not train; their workers do.
OTHER_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.launch",
    "mpguard", "mpguard.__main__", "mpguard.tune.start",
)  # fmt: skip


def program(argv: list[str]) -> tuple[str, int]:
    """Return the program that an interpreter runs (a script's file name, or a module), and where its arguments begin.

    argv: `sys.orig_argv`. The name is empty for `-c`, standard input and an interactive interpreter.
    """
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        is_single = argv[position].startswith("--") or argv[position][1:2] in ("X", "W")
        last = "" if is_single else argv[position][-1]  # `-um MODULE` is `-u -m MODULE`
        if last == "c" or argv[position] == "-":
            return "", len(argv)
        if last == "m":
            return "".join(argv[position + 1 : position + 2]), position + 2
        position += 2 if argv[position] in ("-X", "-W", "--check-hash-based-pycs") else 1
    return Path("".join(argv[position : position + 1])).name, position + 1


def launch_arguments(argv: list[str]) -> int | None:
    """Return where the arguments of an `accelerate launch` begin; None for another program.

    Recognized are `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch` and
    `python -m accelerate.commands.accelerate_cli launch`.
    """
    name, begin = program(argv)
    if name in (LAUNCHER, "accelerate-launch"):
        return begin
    if name in ("accelerate", "accelerate.commands.accelerate_cli") and argv[begin : begin + 1] == ["launch"]:
        return begin + 1
    return None


def install() -> None:
    """Register the callback of this process, if it is an `accelerate launch` or a worker. Runs at interpreter start."""
    begin = launch_arguments(sys.orig_argv)
    if begin is not None:
        count = len(sys.orig_argv) - begin
        import_hooks.after(LAUNCHER, lambda module: _rewrite_launch(module, count))
    elif os.environ.get("MPGUARD_POLICY") and program(sys.orig_argv)[0] not in OTHER_LAUNCHERS:
        # Every library that is patched imports torch first.
        import_hooks.after("torch", _activate_worker)


def _rewrite_launch(module: ModuleType, count: int) -> None:
    """Rewrite the last `count` arguments of this process. module: accelerate's launcher."""
    from mpguard.runtime.launch import launcher

    arguments = sys.argv[len(sys.argv) - count :] if count else []
    launcher.rewrite(arguments, module.launch_command_parser)
    sys.argv[len(sys.argv) - count :] = arguments


def _activate_worker(_torch: ModuleType) -> None:
    """Put the inherited policy in force; exit with 1 if it cannot be in force, with 2 if it cannot be read."""
    from mpguard.core.console import print_line
    from mpguard.core.errors import MpguardError, NotInForce
    from mpguard.runtime import activation, exit_hooks, guard
    from mpguard.runtime.messages import failure_message
    from mpguard.runtime.plan import Plan
    from mpguard.runtime.ranks import is_started_by_script

    if guard.current() is not None:
        return
    plan = Plan.from_environment()
    if plan is None:
        return
    try:
        exit_hooks.ExitHooks(activation.start(plan, launched=not is_started_by_script())).install()
    except NotInForce as error:
        print_line(f"mpguard: {failure_message(error)}")
        raise SystemExit(1) from None
    except MpguardError as error:
        print_line(f"mpguard: {error}")
        raise SystemExit(2) from None


install()
