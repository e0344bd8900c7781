"""Run a training script in this process under its policy: the implementation of `python -m mpguard.run`."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import importlib.abc
import importlib.util
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from mpguard.core.errors import ConfigError, MpguardError, NotInForce
from mpguard.core.watch_levels import WATCH_LEVELS
from mpguard.document import mp_yaml, read
from mpguard.runtime import activation, exit_hooks, lost_ranks, meter
from mpguard.runtime.containment import without_wrappers
from mpguard.runtime.crashes import print_cause
from mpguard.runtime.guard import Guard
from mpguard.runtime.last_lines import print_last
from mpguard.runtime.messages import failure_message
from mpguard.runtime.plan import CONFIG, Plan, absolute, refuse_config_after_script
from mpguard.runtime.ranks import is_reporting_rank, launcher_variable, rank

#: What `python -m mpguard.run --help` shows.
USAGE = """Run a script with the policy in force and proven.

    accelerate launch --config_file mp.yaml -m mpguard.run --config mp.yaml train.py --lr 3
    torchrun --nproc_per_node 2 -m mpguard.run --config mp.yaml train.py --lr 3

The policy is that of --config, else the one in MPGUARD_POLICY, else `[tool.mpguard] recipe`.
Exit status: the script's; 1 not in force, 2 could not start (both with a `mpguard:` line on stderr).
"""

#: The module that `python -m` runs as `__main__`.
ENTRY = "mpguard.run"


#: What is around the script of a plan: entered when the policy is in force, left when the script has ended.
Around = Callable[[Plan], contextlib.AbstractContextManager[None]]


def main(argv: Sequence[str] | None = None, *, around: Around) -> int:
    """Run a script under its policy, and return the status that the process should end with."""
    options = _parse(list(sys.argv[1:] if argv is None else argv))
    if isinstance(options, int):
        return options
    entered = contextlib.ExitStack()
    try:
        if options.config is None and not os.environ.get(CONFIG):
            refuse_config_after_script(options.script, options.arguments)
        plan = Plan.resolve(options.config, enforce=options.enforce, proof_json=options.proof_json, allow=options.allow)
        plan = dataclasses.replace(
            plan,
            policy=plan.policy.emulated() if options.emulate else plan.policy,
            watch=options.watch or plan.watch,
            watch_json=absolute(options.watch_json) or plan.watch_json,
        )
        if options.config is not None:
            apply_use_cpu(Path(options.config))
        guard = activation.start(plan)
        entered.enter_context(around(plan))
    except NotInForce as error:
        return _refuse(failure_message(error), 1, error.reasons)
    except MpguardError as error:
        return _refuse(str(error), 2)
    with entered:
        status = _run(options, guard)
    return exit_hooks.finish(guard, status)


def _parse(argv: list[str]) -> argparse.Namespace | int:
    """Return the options, or the exit status if the command line cannot be used or asks for help."""
    parser = argparse.ArgumentParser(prog="python -m mpguard.run", description=USAGE, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="the mp.yaml")
    parser.add_argument("--enforce", choices=("error", "warn", "off"), help="what a mismatch does")
    parser.add_argument("--proof-json", metavar="FILE", help="the file that the proof is written to")
    parser.add_argument("--allow", metavar="NAME", action="append", help="a deviation that is wanted, as frozen:fp16")
    parser.add_argument("--emulate", action="store_true", help="compute the policy's FP8 in software (torchao)")
    parser.add_argument("--watch", choices=WATCH_LEVELS, help="report NaN, skipped steps, underflow, divergence")
    parser.add_argument("--watch-json", metavar="FILE", help="the file that the watch is written to")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the deepspeed launcher's, for SCRIPT
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    try:
        options = parser.parse_args(argv)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 2
    if options.local_rank is not None:
        options.arguments.insert(0, f"--local_rank={options.local_rank}")
    return options


def apply_use_cpu(path: Path) -> None:
    """Set accelerate's variable for `use_cpu: true`: its own launcher sets it, torchrun does not."""
    if mp_yaml.runs_on_cpu(read(path).require()):
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _run(options: argparse.Namespace, guard: Guard) -> int:
    """Run the script and return its own status. Its exceptions are printed without mpguard's frames."""
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            sys.path.insert(0, str(Path.cwd()))
            _run_module(options.script)
        else:
            _run_file(Path(options.script))
    except NotInForce as error:
        if guard.alone:
            lost_ranks.publish(error)
        is_printed_here = is_reporting_rank() or guard.alone
        on_first_node = not launcher_variable("GROUP_RANK", 0)
        _record(error, None if is_printed_here or on_first_node else f"mpguard: {failure_message(error)}")
        exit_hooks.print_failure(guard, error)
        return 1
    except MpguardError as error:
        _record(error)
        return _refuse(str(error), 2)
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        lost_ranks.publish(error)
        _record(error)
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        without_wrappers(error)
        lost_ranks.describe(error)
        _record(error)
        if lost_ranks.refusal():
            return 1  # the collective that has failed is no cause: `finish` prints the line that names it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        print_cause(error)
        return 1
    return 0


def _run_module(name: str) -> None:
    """Run a module as `python -m NAME` does: a package by its `__main__`, with the module's path as `sys.argv[0]`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package on the way imports what is not installed
        spec = None
    if spec is None:
        raise ConfigError(f"-m {name}: there is no such module; run from the folder that contains it, or install it")
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if code is None:
        raise ConfigError(f"-m {name}: is not written in Python; give a module of Python code")
    sys.argv[0] = str(spec.origin)
    _run_in_main(
        code, __file__=spec.origin, __spec__=spec, __loader__=spec.loader, __package__=spec.parent,
        __cached__=spec.cached,
    )  # fmt: skip


def _run_file(path: Path) -> None:
    """Run a file as `python FILE` does: with its folder first on the path."""
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a Python script") from None
    sys.path[0] = str(path.resolve().parent)
    _run_in_main(code, __file__=str(path), __spec__=None, __loader__=None, __package__=None, __cached__=None)


def _run_in_main(code: types.CodeType, **attributes: object) -> None:
    """Run code as the module `__main__`, which stays alive.

    Under `python -m mpguard.run` it is the interpreter's own `__main__`, so that the objects that the script leaves
    behind are destroyed when Python destroys those of a script. Earlier, a process group of gloo would wait, with the
    GIL, for a thread of its own that needs the GIL (seen with torch 2.13).
    """
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) != ENTRY:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.clear()
    main.__dict__.update(__name__="__main__", __builtins__=builtins, __doc__=None, **attributes)
    exec(code, main.__dict__)


def _refuse(message: str, status: int, reasons: str = "") -> int:
    """Print a message on rank 0, and return the status. reasons: the message without the verdict."""
    if rank() == 0:
        print_last(f"mpguard: {message}")
        meter.write_refusal(reasons or message)
    return status


def _record(error: BaseException, line: str | None = None) -> None:
    """Write torchelastic's error file: its timestamp shows torchelastic which rank failed first.

    line: what the launcher of this node prints at its end.

    In the format of its `ErrorHandler`, which would add a traceback to errors that the user has to fix.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    text = f"mpguard: {error}" if isinstance(error, MpguardError) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), **({lost_ranks.LAST_LINE: line} if line else {})}
    with contextlib.suppress(OSError):
        Path(path).write_text(
            json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
        )


def run_and_exit(*, around: Around) -> None:
    """Run `main` and exit with its status."""
    status = main(around=around)
    sys.stdout.flush()
    sys.exit(status)
