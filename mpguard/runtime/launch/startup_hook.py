"""What the line in `mpguard_hook.pth` imports, and only in processes that may be concerned.

In the launcher, `accelerate launch --config mp.yaml` gets its arguments rewritten once accelerate's
parser is there and before it has read them. In the workers, which inherit `MPGUARD_POLICY`, the
policy is activated. Nothing is imported now: both wait for the libraries to come in.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from mpguard.runtime.patches import import_hooks

LAUNCHER = "accelerate.commands.launch"

#: They import torch and train nothing; their workers do.
OTHER_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.launch",
    "mpguard", "mpguard.__main__",
)  # fmt: skip


def program(argv: list[str]) -> tuple[str, int]:
    """The program that an interpreter runs (a script's file name, or a module), and where its arguments begin.

    argv: `sys.orig_argv`. The name is empty for `-c`, standard input and an interactive interpreter.
    """
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        alone = argv[position].startswith("--") or argv[position][1:2] in ("X", "W")
        last = "" if alone else argv[position][-1]  # `-um MODULE` is `-u -m MODULE`
        if last == "c" or argv[position] == "-":
            return "", len(argv)
        if last == "m":
            return "".join(argv[position + 1 : position + 2]), position + 2
        position += 2 if argv[position] in ("-X", "-W", "--check-hash-based-pycs") else 1
    return Path("".join(argv[position : position + 1])).name, position + 1


def launch_arguments(argv: list[str]) -> int | None:
    """Where the arguments of an `accelerate launch` begin; None for another program.

    Known are `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch` and
    `python -m accelerate.commands.accelerate_cli launch`.
    """
    name, begin = program(argv)
    if name in (LAUNCHER, "accelerate-launch"):
        return begin
    if name in ("accelerate", "accelerate.commands.accelerate_cli") and argv[begin : begin + 1] == ["launch"]:
        return begin + 1
    return None


def install() -> None:
    """Called once, at interpreter start."""
    begin = launch_arguments(sys.orig_argv)
    if begin is not None:
        count = len(sys.orig_argv) - begin
        import_hooks.after(LAUNCHER, lambda module: _launcher(module, count))
    elif os.environ.get("MPGUARD_POLICY") and program(sys.orig_argv)[0] not in OTHER_LAUNCHERS:
        # Before torch, so that it is in place for whatever comes in first.
        import_hooks.after("torch", _worker)


def _launcher(module: ModuleType, count: int) -> None:
    from mpguard.runtime.launch import launcher

    arguments = sys.argv[len(sys.argv) - count :] if count else []
    launcher.rewrite(arguments, module.launch_command_parser)
    sys.argv[len(sys.argv) - count :] = arguments


def _worker(_torch: ModuleType) -> None:
    from mpguard.core.console import print_line
    from mpguard.core.errors import MpguardError, NotInForce
    from mpguard.runtime import activation, exit_hooks, guard
    from mpguard.runtime.messages import failure_message
    from mpguard.runtime.plan import Plan

    if guard.current() is not None:
        return
    plan = Plan.from_environment()
    if plan is None:
        return
    try:
        exit_hooks.ExitHooks(activation.start(plan)).take_over()
    except NotInForce as error:
        print_line(f"mpguard: {failure_message(str(error))}")
        raise SystemExit(1) from None
    except MpguardError as error:
        print_line(f"mpguard: {error}")
        raise SystemExit(2) from None


install()
