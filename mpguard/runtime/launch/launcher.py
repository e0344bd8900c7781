"""The launcher: resolve the policy once, refuse runs that cannot be in force, hand the plan to the workers.

Used by `mpguard launch`, which then runs accelerate's own launcher in this process with
`mpguard.run` in each worker, and by the startup hook, which rewrites the arguments of an
`accelerate launch` before accelerate reads them.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.core import settings
from mpguard.core.console import columns, print_line, wrapped
from mpguard.core.errors import ConfigError, MpguardError, NotInForce, did_you_mean_file
from mpguard.core.watch_levels import WATCH_LEVELS
from mpguard.document import mp_yaml, read
from mpguard.policy.allow import allowances
from mpguard.runtime.last_lines import printed_at_the_end
from mpguard.runtime.launch import preflight, signals
from mpguard.runtime.launch.build_locks import abandoned_locks, remove_own
from mpguard.runtime.lost_ranks import LAST_LINE
from mpguard.runtime.messages import OVERRIDE, failure_message, header
from mpguard.runtime.patches import windows
from mpguard.runtime.plan import Plan, absolute, enforcement, refuse_config_after_script, strategy_of
from mpguard.runtime.plan_exchange import place
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import NOT_IN_FORCE, Failure, FailureKind
from mpguard.targets.capabilities import require_supported, slower_demand
from mpguard.targets.inject import Change, differences
from mpguard.targets.settings import Setting, merged, show

#: The type of accelerate's `launch_command_parser`.
ParserFactory = Callable[[], argparse.ArgumentParser]

#: The option with which FP8 is computed in software.
EMULATE = "--emulate"

#: The options of accelerate without a default that replace a key of the config.
_REPLACING = (
    "num_processes", "num_machines", "machine_rank", "gpu_ids", "main_process_ip", "main_process_port",
    "dynamo_backend", "deepspeed_multinode_launcher",
)  # fmt: skip

#: The options of mpguard, each with a value, that are not accelerate's.
_OWN_OPTIONS = (
    "--enforce", "--proof-json", "--proof_json", "--allow", "--watch", "--watch-json", "--watch_json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PreparedLaunch:
    """A launch that passed all checks.

    flags, script, arguments: the command line for accelerate's parser. environment: the variables that workers inherit.
    header: the lines to print.
    """

    plan: Plan
    flags: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    header: str

    @property
    def argv(self) -> list[str]:
        return [*self.flags, self.script, *self.arguments]


def prepare(
    argv: Sequence[str], parser_factory: ParserFactory, overrides: Mapping[str, Any] | None = None
) -> PreparedLaunch | None:
    """Check a command line of `accelerate launch` with mpguard's options in it; return None if it names no config.

    overrides: fields of the policy that have other values than in the config.
    Raises `NotInForce` if the run is refused, another `MpguardError` if it cannot start.
    """
    argv = list(argv)
    options = _parse(argv, parser_factory)
    script, arguments = options.training_script, list(options.training_script_args)
    if options.config_file is None:
        refuse_config_after_script(script, arguments)
        return None
    if not options.module and not Path(script).is_file():
        similar = did_you_mean_file(script) or "; give the path of the script to launch"
        raise ConfigError(f"{script}: there is no such file{similar}")
    path = Path(options.config_file)
    document = read(path)
    config = document.require()
    preflight.check_config(document, [name for name in _REPLACING if getattr(options, name) is not None])
    policy = mp_yaml.load_policy(path)
    if overrides:
        policy = policy.replace(**overrides)
    if options.emulate:
        policy = policy.emulated()
    if options.no_python:
        raise ConfigError(
            f"--no_python: {script} would not run in Python, and mpguard can put a policy in force in Python only. "
            "Remove the flag"
        )
    kind = _kind(options, config)
    machines = options.num_machines or config.get("num_machines") or 1
    preflight.check_remote_shell(document, kind, int(machines), options.deepspeed_multinode_launcher)
    processes = options.num_processes or config.get("num_processes")
    effective = {**config, "distributed_type": kind, "num_processes": processes, **_sections(options, config)}
    stored = mp_yaml.stored(document)
    plan = Plan(
        policy,
        config=str(path.absolute()),
        strategy=strategy_of(effective, path),
        processes=processes if isinstance(processes, int) and processes > 0 else None,
        enforce=enforcement(options.enforce, path),
        proof_json=absolute(options.proof_json),
        announced=True,
        allow=(*stored.allow, *allowances(options.allow)),
        watch=options.watch or stored.watch,
        watch_json=absolute(options.watch_json),
    )
    changes = differences(config, policy, "accelerate", plan.strategy)
    launch = preflight.PlannedLaunch(plan, document, kind, tuple(changes), has_accelerator())
    libraries = windows.of_run(policy, plan.strategy)
    _refuse(plan, [*preflight.refusals(launch), *windows.refusals(libraries, policy, plan.strategy)])
    require_supported("accelerate", policy, plan.strategy)
    flags = argv[: len(argv) - len(arguments) - 1]
    flags, header = _flags(flags, options, launch)
    lines = [*preflight.ignored_keys(document), *windows.lines(libraries)]
    header = "\n".join([header, *(f"mpguard: {line}" for line in lines)])
    environment = dict(plan.environment())
    if kind == "MULTI_CPU" and (plan.processes or 1) > 1 and not _uses_mpi(options, config):
        # Stock accelerate starts one process for MULTI_CPU; its torchrun launcher starts `num_processes` (S21).
        flags = [*without_options(flags, (), ("--cpu",)), "--multi_gpu"]
        if options.num_processes is None:
            flags += ["--num_processes", str(plan.processes)]
        environment["ACCELERATE_USE_CPU"] = "true"
    return PreparedLaunch(plan, tuple(flags), script, tuple(arguments), environment, header)


def _parse(argv: list[str], parser_factory: ParserFactory) -> argparse.Namespace:
    """Parse with a new instance of accelerate's parser, to which mpguard's options are added. Raises `ConfigError`."""
    parser = parser_factory()
    parser.add_argument("--config", dest="config_file", default=None)
    parser.add_argument("--enforce", choices=("error", "warn", "off"), default=None)
    parser.add_argument("--proof-json", "--proof_json", dest="proof_json", default=None)
    parser.add_argument("--allow", action="append", default=None)
    parser.add_argument(EMULATE, action="store_true")
    parser.add_argument("--watch", choices=WATCH_LEVELS, default=None)
    parser.add_argument("--watch-json", "--watch_json", dest="watch_json", default=None)

    def refuse_launch(message: str) -> None:
        if "required: training_script" in message:
            message = "no script is given; the command is mpguard launch --config mp.yaml SCRIPT"
        raise ConfigError(message)

    parser.error = refuse_launch  # type: ignore[method-assign,assignment]
    return parser.parse_args(argv)


def has_accelerator() -> bool:
    """True if torch finds a GPU or another accelerator in this process."""
    import torch

    return bool(torch.accelerator.is_available())


def _kind(options: argparse.Namespace, config: Mapping[str, Any]) -> str:
    """Return accelerate's `distributed_type`; flags override the file."""
    if options.use_deepspeed:
        return "DEEPSPEED"
    if options.use_fsdp:
        return "FSDP"
    if options.multi_gpu:
        return "MULTI_GPU"
    value = config.get("distributed_type")
    kind = "NO" if value in (None, False) else str(value)  # YAML reads an unquoted NO as a boolean
    if options.cpu and kind != "NO":
        return "MULTI_CPU"
    return kind


def _sections(options: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of the config that define the strategy, with the flags that were given."""
    given: set[str] = getattr(options, "nondefault", set())
    sections: dict[str, Any] = {}
    for section, key, flag in (
        ("fsdp_config", "fsdp_version", "fsdp_version"),
        ("deepspeed_config", "zero_stage", "zero_stage"),
        ("deepspeed_config", "deepspeed_config_file", "deepspeed_config_file"),
    ):
        before = sections.get(section) or config.get(section) or {}
        if flag in given and isinstance(before, dict):
            sections[section] = {**before, key: getattr(options, flag)}
    return sections


def _uses_mpi(options: argparse.Namespace, config: Mapping[str, Any]) -> bool:
    return bool(options.mpirun_hostfile or (config.get("mpirun_config") or {}).get("mpirun_hostfile"))


def _refuse(plan: Plan, reasons: list[str]) -> None:
    """Raise `NotInForce` with the reasons, if any; with `enforce` warn print them, with off ignore them."""
    if not reasons or plan.enforce == "off":
        return
    if plan.enforce == "warn":
        for reason in reasons:
            print_line(f"mpguard: not in force (continuing: enforce is warn): {reason}")
        return
    message = "\n  ".join(reasons)
    if plan.proof_json:
        failures = tuple(Failure(FailureKind.WRONG, reason) for reason in reasons)
        Proof(NOT_IN_FORCE, plan, failures=failures).write(plan.proof_json)
    raise NotInForce(f"{message}.", override=OVERRIDE)


def _flags(flags: list[str], options: argparse.Namespace, launch: preflight.PlannedLaunch) -> tuple[list[str], str]:
    """Return accelerate's flags with the policy in the config, and the header that lists what was overridden."""
    plan, document = launch.plan, launch.document
    overridden = [change for change in launch.changes if change.overrides or change.key == "mixed_precision"]
    flags = without_options(flags, ("--config", "--config_file", "--config-file", *_OWN_OPTIONS), (EMULATE,))
    config = merged(launch.config, {change.key: Setting(change.new) for change in launch.changes})
    mode = config.get("mixed_precision", "bf16" if plan.policy.bf16 else "fp16" if plan.policy.fp16 else "no")
    given = options.mixed_precision
    if given is not None and str(given).lower() != str(mode).lower():
        overridden.append(Change("mixed_precision", given, mode, "--mixed_precision"))
    flags = without_options(flags, ("--mixed_precision", "--mixed-precision"), ())
    if given is not None or "mixed_precision" not in config:
        # With a DeepSpeed file, accelerate reads the mode from this flag only (S25).
        flags += ["--mixed_precision", str(mode).lower()]  # in a config accelerate accepts BF16 too
    path = _write_config(config) if launch.changes else document.path
    return ["--config_file", path, *flags], _header(plan, launch, str(mode), overridden)


def _header(plan: Plan, launch: preflight.PlannedLaunch, mode: str, overridden: Sequence[Change]) -> str:
    name = Path(launch.document.path).name
    rows = [(change.key, f"{show(change.old)} -> {show(change.new)}", change.reason or name) for change in overridden]
    if not any(key == "mixed_precision" for key, _, _ in rows):
        rows.insert(0, ("mixed_precision", mode, name))
    reduce = plan.policy.reduce_dtype
    if plan.strategy and plan.strategy.startswith(("fsdp", "deepspeed")) and plan.policy.params_dtype is not reduce:
        default = f"{plan.strategy} would reduce in {plan.policy.params_dtype}"
        rows.append(("reduce_dtype", f"{plan.policy.params_dtype} -> {reduce}", f"grad_reduce_in_fp32 ({default})"))
    for field, reason in plan.left_out_at_start().items():
        rows.append((field, "off", reason))
    if (cost := slower_demand(plan.policy, plan.strategy, plan.processes)) is not None:
        rows.append(("fp8_param", "true", cost))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        header(plan),
        *(
            wrapped(f"  {key:{widths[0]}}  {values:{widths[1]}}  {reason}".rstrip(), 4, columns(sys.stderr))
            for key, values, reason in rows
        ),
    ]
    return "\n".join(lines)


def _write_config(config: Mapping[str, Any]) -> str:
    """Write the config with the policy in it to a temporary file, and return its path."""
    folder = tempfile.mkdtemp(prefix="mpguard-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "mp.json"
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(path)


def without_options(tokens: Sequence[str], valued: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Return the tokens without some options, which may be given as `--name value` or `--name=value`."""
    remaining: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token in valued:
            position += 2
            continue
        if token not in switches and not any(token.startswith(f"{name}=") for name in valued):
            remaining.append(token)
        position += 1
    return remaining


# -- running -------------------------------------------------------------------------------------


def _print_start(prepared: PreparedLaunch) -> None:
    """Print the header, and the build locks for which the workers might wait indefinitely."""
    print_line(prepared.header)
    for lock in abandoned_locks() if _uses_deepspeed(prepared) else ():
        print_line(
            f"mpguard: {lock}: a build of a torch extension was killed and left its lock behind. A run that needs the "
            f"extension waits for it indefinitely. If no build is running, remove it: rm {lock}"
        )


def _uses_deepspeed(prepared: PreparedLaunch) -> bool:
    """True if DeepSpeed, which compiles extensions, is named: by the config, the arguments or the script."""
    words = [prepared.plan.strategy or "", *prepared.flags, *prepared.arguments]
    with contextlib.suppress(OSError):  # a module
        words.append(Path(prepared.script).read_text(encoding="utf-8", errors="replace"))
    return any("deepspeed" in word.lower() for word in words)


def _is_of_interest(record: logging.LogRecord) -> bool:
    """False for accelerate's notice that it has set the number of CPU threads, which `mpguard init` leaves to it."""
    flags = re.findall(r"`--(\w+)` was set", record.getMessage())
    return flags != ["num_cpu_threads_per_process"]


def run(argv: Sequence[str], overrides: Mapping[str, Any] | None = None) -> int:
    """Run `mpguard launch`: check the run, start accelerate's launcher here, return the script's status.

    overrides: see `prepare`.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    prepared = prepare(argv, launch_command_parser, overrides)
    if prepared is None:
        raise ConfigError(preflight.NO_CONFIG)
    remove_own()
    logging.getLogger("accelerate.commands.launch").addFilter(_is_of_interest)
    _print_start(prepared)
    module = [flag for flag in prepared.flags if flag in ("-m", "--module")]
    flags = without_options(prepared.flags, (), ("-m", "--module"))
    command = [*flags, "--module", "mpguard.run", *(["-m"] if module else []), prepared.script, *prepared.arguments]
    os.environ.update(prepared.environment)
    options = launch_command_parser().parse_args(command)
    options.quiet = False  # with accelerate's `quiet`, the status of a failed script is always 1
    with signals.as_exceptions(), signals.ending_what_waits(), printed_at_the_end():
        try:
            return _launch(launch_command, options)
        finally:
            remove_own()


def _launch(launch_command: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Run accelerate's launcher and return the status of the script: with several ranks, of the first that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(options)
    except subprocess.CalledProcessError as error:
        return shell_status(error.returncode)
    except ChildFailedError as error:
        # torchelastic ends the other ranks with SIGTERM; they are not the cause, whatever their timestamps are.
        causes = [failure for failure in error.failures.values() if failure.exitcode != -signal.SIGTERM]
        first = min(causes, key=lambda failure: failure.timestamp, default=error.get_first_failure()[1])
        _print_last_line(error, first)
        return shell_status(first.exitcode)
    except SignalException as error:
        return signals.end_workers(int(error.sigval))
    except KeyboardInterrupt:
        return signals.end_workers(signal.SIGINT)
    except signals.Signalled as error:
        return signals.end_workers(error.number)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except Exception as error:  # accelerate itself refuses the run before a worker starts
        raise ConfigError(f"accelerate could not start: {type(error).__name__}: {error}") from error
    return 0


def _print_last_line(error: Any, first: Any) -> None:
    """Print why this node ends, if none of its workers could: one was killed, or another node was lost.

    error: torchelastic's `ChildFailedError`. first: the failure of the worker that failed first.
    """
    number = next(rank for rank, failure in error.failures.items() if failure is first)
    if first.exitcode < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-first.exitcode).name
            print_line(f"mpguard: rank {number} ({place()}) was ended by {name}")
        return
    lines = [_last_line(failure.error_file_data) for failure in error.failures.values()]
    if line := next((line for line in lines if line), None):
        print_line(line)


def _last_line(data: Any) -> str | None:
    """Return the line that a worker has left for its launcher in torchelastic's error file."""
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        return str(data["message"]["extraInfo"][LAST_LINE])
    return None


def shell_status(status: int) -> int:
    """Return a status as a shell does: 128 + the number of the signal that ended the process."""
    return 128 - status if status < 0 else status


# -- the hook ------------------------------------------------------------------------------------


def rewrite(argv: list[str], parser_factory: ParserFactory, environment: dict[str, str] | None = None) -> None:
    """Rewrite the arguments of an `accelerate launch` in place, so that its mp.yaml is in force.

    Does nothing for a config that names no recipe. Ends the process with a `mpguard:` line if the run
    is refused (status 1) or cannot start (status 2). argv: without the program and the command.
    """
    try:
        if not _names_recipe(argv, parser_factory):
            return
        prepared = prepare(argv, parser_factory)
    except NotInForce as error:
        print_line(f"mpguard: {failure_message(error)}")
        raise SystemExit(1) from None
    except MpguardError as error:
        print_line(f"mpguard: {error}")
        raise SystemExit(2) from None
    if prepared is None:
        return
    _print_start(prepared)
    signals.end_what_waits()
    (os.environ if environment is None else environment).update(prepared.environment)
    argv[:] = prepared.argv


def _names_recipe(argv: list[str], parser_factory: ParserFactory) -> bool:
    """True if the given config names a recipe, or if there is none: a config after the script must still be refused.

    False for arguments that accelerate will refuse itself.
    """
    try:
        options = _parse(argv, parser_factory)
    except ConfigError:
        return False
    if options.config_file is None or not Path(options.config_file).is_file():
        return options.config_file is None
    path = Path(options.config_file)
    document = read(path)
    return mp_yaml.stored(document).recipe is not None or settings.nearest(path).recipe is not None
