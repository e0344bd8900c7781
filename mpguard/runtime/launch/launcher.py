"""The launcher half: the policy is resolved once, what can be refused is refused, workers are told.

It serves `mpguard launch`, which then runs accelerate's own launcher in this process with
`mpguard.run` in each worker, and the hook, which rewrites the arguments of an `accelerate launch`
that is about to read them.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mpguard.core import settings
from mpguard.core.console import print_line
from mpguard.core.errors import ConfigError, MpguardError, NotInForce
from mpguard.document import mp_yaml, read
from mpguard.runtime.launch import preflight
from mpguard.runtime.messages import header
from mpguard.runtime.plan import Plan, absolute, enforcement, refuse_config_after_script, strategy_of
from mpguard.runtime.proof.compare import Proof
from mpguard.targets.capabilities import require_supported
from mpguard.targets.inject import Change, differences
from mpguard.targets.settings import Setting, merged, show

#: `launch_command_parser` of accelerate.
ParserFactory = Callable[[], argparse.ArgumentParser]

#: Seconds that workers have to end after a signal before they are killed.
GRACE = 10.0


@dataclasses.dataclass(frozen=True)
class PreparedLaunch:
    """A launch that nothing speaks against.

    flags, script, arguments: what accelerate's parser is given. environment: what workers inherit.
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


def prepare(argv: Sequence[str], parser_factory: ParserFactory) -> PreparedLaunch | None:
    """Reads a command line of `accelerate launch` with our options in it; None where no config is given.

    Raises `NotInForce` for what is refused, `MpguardError` for what cannot start.
    """
    argv = list(argv)
    options = _parsed(argv, parser_factory)
    script, arguments = options.training_script, list(options.training_script_args)
    if options.config_file is None:
        refuse_config_after_script(script, arguments)
        return None
    if not options.module and not Path(script).is_file():
        raise ConfigError(f"{script}: there is no such file; the script to launch is needed")
    path = Path(options.config_file)
    document = read(path)
    config = document.require()
    preflight.readable(document, options.num_processes)
    policy = mp_yaml.load_policy(path)
    if options.no_python:
        raise ConfigError(
            f"--no_python: {script} is no Python that mpguard could put the policy in force in. Remove the flag"
        )
    kind = _kind(options, config)
    processes = options.num_processes or config.get("num_processes")
    asked = {**config, "distributed_type": kind, "num_processes": processes, **_sections(options, config)}
    plan = Plan(
        policy,
        config=str(path.absolute()),
        strategy=strategy_of(asked, path),
        processes=processes if isinstance(processes, int) and processes > 0 else None,
        enforce=enforcement(options.enforce, path),
        proof_json=absolute(options.proof_json),
        announced=True,
    )
    changes = differences(config, policy, "accelerate", plan.strategy)
    launch = preflight.PlannedLaunch(plan, document, kind, tuple(changes), accelerator_here())
    _refuse(plan, list(preflight.refusals(launch)))
    require_supported("accelerate", policy, plan.strategy)
    flags = argv[: len(argv) - len(arguments) - 1]
    flags, header = _flags(flags, options, launch)
    environment = dict(plan.environment())
    if kind == "MULTI_CPU" and (plan.processes or 1) > 1 and not _uses_mpi(options, config):
        # Stock accelerate starts one process for MULTI_CPU; its torchrun launcher starts those asked for (S21).
        flags = [*_without(flags, (), ("--cpu",)), "--multi_gpu"]
        if options.num_processes is None:
            flags += ["--num_processes", str(plan.processes)]
        environment["ACCELERATE_USE_CPU"] = "true"
    return PreparedLaunch(plan, tuple(flags), script, tuple(arguments), environment, header)


def _parsed(argv: list[str], parser_factory: ParserFactory) -> argparse.Namespace:
    """accelerate's own parser, an instance of our own, with the options that it does not have."""
    parser = parser_factory()
    parser.add_argument("--config", dest="config_file", default=None)
    parser.add_argument("--enforce", choices=("error", "warn", "off"), default=None)
    parser.add_argument("--proof-json", "--proof_json", dest="proof_json", default=None)

    def refuse_launch(message: str) -> None:
        if "required: training_script" in message:
            message = "no script is given: mpguard launch --config mp.yaml SCRIPT"
        raise ConfigError(message)

    parser.error = refuse_launch  # type: ignore[method-assign,assignment]
    return parser.parse_args(argv)


def accelerator_here() -> bool:
    """Whether torch finds a GPU or its like in this process."""
    import torch

    return bool(torch.accelerator.is_available())


def _kind(options: argparse.Namespace, config: Mapping[str, Any]) -> str:
    """accelerate's `distributed_type`, where its flags come before the file."""
    if options.use_deepspeed:
        return "DEEPSPEED"
    if options.use_fsdp:
        return "FSDP"
    if options.multi_gpu:
        return "MULTI_GPU"
    said = config.get("distributed_type")
    kind = "NO" if said in (None, False) else str(said)  # unquoted, NO is a boolean
    if options.cpu and kind != "NO":
        return "MULTI_CPU"
    return kind


def _sections(options: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that decide the strategy, with the flags that were given."""
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
    if not reasons or plan.enforce == "off":
        return
    if plan.enforce == "warn":
        for reason in reasons:
            print_line(f"mpguard: not in force (going on: enforce warn): {reason}")
        return
    message = "\n  ".join(reasons)
    if plan.proof_json:
        Proof("not in force", plan, failures=tuple(reasons)).write(plan.proof_json)
    raise NotInForce(f"{message}.  (--enforce warn to go on anyway)")


def _flags(flags: list[str], options: argparse.Namespace, launch: preflight.PlannedLaunch) -> tuple[list[str], str]:
    """accelerate's flags with the policy in the config, and the header that says what was overridden."""
    plan, document = launch.plan, launch.document
    overridden = [change for change in launch.changes if change.overrides or change.key == "mixed_precision"]
    flags = _without(
        flags, ("--config", "--config_file", "--config-file", "--enforce", "--proof-json", "--proof_json"), ()
    )
    config = merged(launch.config, {change.key: Setting(change.new) for change in launch.changes})
    mode = config.get("mixed_precision", "bf16" if plan.policy.bf16 else "fp16" if plan.policy.fp16 else "no")
    said = options.mixed_precision
    if said is not None and str(said).lower() != str(mode).lower():
        overridden.append(Change("mixed_precision", said, mode, "--mixed_precision"))
    flags = _without(flags, ("--mixed_precision", "--mixed-precision"), ())
    if said is not None or "mixed_precision" not in config:
        flags += [
            "--mixed_precision",
            str(mode),
        ]  # the one place that accelerate takes it from beside a DeepSpeed file (S25)
    path = _written(config) if launch.changes else document.path
    return ["--config_file", path, *flags], _header(plan, launch, str(mode), overridden)


def _header(plan: Plan, launch: preflight.PlannedLaunch, mode: str, overridden: Sequence[Change]) -> str:
    name = Path(launch.document.path).name
    rows = [(change.key, f"{show(change.old)} -> {show(change.new)}", change.reason or name) for change in overridden]
    if not any(key == "mixed_precision" for key, _, _ in rows):
        rows.insert(0, ("mixed_precision", mode, name))
    reduce = plan.policy.reduce_dtype
    if plan.strategy and plan.strategy.startswith(("fsdp", "deepspeed")) and plan.policy.params_dtype is not reduce:
        usual = f"{plan.strategy} would reduce in {plan.policy.params_dtype}"
        rows.append(("reduce_dtype", f"{plan.policy.params_dtype} -> {reduce}", f"grad_reduce_in_fp32 ({usual})"))
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        header(plan),
        *(f"  {key:{wide[0]}}  {values:{wide[1]}}  {why}".rstrip() for key, values, why in rows),
    ]
    return "\n".join(lines)


def _written(config: Mapping[str, Any]) -> str:
    """The config with the policy in it, in a file of our own; the user's stays as it is."""
    folder = tempfile.mkdtemp(prefix="mpguard-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "mp.json"
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(path)


def _without(tokens: Sequence[str], valued: Sequence[str], switches: Sequence[str]) -> list[str]:
    """The tokens without some options, given as `--name value` or `--name=value`."""
    kept: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token in valued:
            position += 2
            continue
        if token not in switches and not any(token.startswith(f"{name}=") for name in valued):
            kept.append(token)
        position += 1
    return kept


# -- running -------------------------------------------------------------------------------------


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def run(argv: Sequence[str]) -> int:
    """`mpguard launch`: prepares, starts accelerate's launcher here, returns the script's status."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    prepared = prepare(argv, launch_command_parser)
    if prepared is None:
        raise ConfigError(
            "no --config is given: mpguard launch --config mp.yaml SCRIPT (`mpguard init bf16_mixed` writes one)"
        )
    print_line(prepared.header)
    module = [flag for flag in prepared.flags if flag in ("-m", "--module")]
    flags = _without(prepared.flags, (), ("-m", "--module"))
    command = [*flags, "--module", "mpguard.run", *(["-m"] if module else []), prepared.script, *prepared.arguments]
    os.environ.update(prepared.environment)
    options = launch_command_parser().parse_args(command)
    options.quiet = False  # accelerate's quiet replaces the status by 1
    with _signals():
        return _status(launch_command, options)


def _status(launch_command: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """The status of the script; of the first rank that failed where there are several."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(options)
    except subprocess.CalledProcessError as error:
        return _plain(error.returncode)
    except ChildFailedError as error:
        # Those that torchelastic has ended itself (SIGTERM) are the consequence, whatever their times say.
        itself = [failure for failure in error.failures.values() if failure.exitcode != -signal.SIGTERM]
        first = min(itself, key=lambda failure: failure.timestamp, default=error.get_first_failure()[1])
        return _plain(first.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return _end_workers(signal.SIGINT)
    except _Signalled as error:
        return _end_workers(error.number)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except Exception as error:  # what accelerate itself refuses, before a worker starts
        raise ConfigError(f"accelerate could not start: {type(error).__name__}: {error}") from error
    return 0


def _plain(status: int) -> int:
    """A status as a shell has it: 128 + the number of the signal that ended a process."""
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the workers too; Ctrl-C does by itself. torchelastic takes over for its own."""

    def handler(number: int, _frame: FrameType | None) -> None:
        raise _Signalled(number)

    former = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, was in former.items():
            signal.signal(number, was)


def _end_workers(number: int) -> int:
    """Passes a signal on to the workers, and waits until they have ended."""
    import psutil  # type: ignore[import-untyped]  # accelerate needs it too

    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
    with contextlib.suppress(KeyboardInterrupt):
        _gone, left = psutil.wait_procs(workers, timeout=GRACE)
        workers = left
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    return 128 + number


# -- the hook ------------------------------------------------------------------------------------


def rewrite(argv: list[str], parser_factory: ParserFactory, environment: dict[str, str] | None = None) -> None:
    """Rewrites the arguments of an `accelerate launch` in place, so that its mp.yaml is in force.

    Does nothing for a config that names no recipe. Ends the process, with a `mpguard:` line, for
    what is refused. argv: without the program and the command.
    """
    try:
        if not _names_recipe(argv, parser_factory):
            return
        prepared = prepare(argv, parser_factory)
    except NotInForce as error:
        print_line(f"mpguard: not in force: {error}")
        raise SystemExit(1) from None
    except MpguardError as error:
        print_line(f"mpguard: {error}")
        raise SystemExit(2) from None
    if prepared is None:
        return
    print_line(prepared.header)
    (os.environ if environment is None else environment).update(prepared.environment)
    argv[:] = prepared.argv


def _names_recipe(argv: list[str], parser_factory: ParserFactory) -> bool:
    """Whether the config given is an mp.yaml. Without a config, or with arguments that accelerate
    will refuse itself, the rest decides: a config after the script must still be refused."""
    try:
        options = _parsed(argv, parser_factory)
    except ConfigError:
        return False
    if options.config_file is None or not Path(options.config_file).is_file():
        return options.config_file is None
    path = Path(options.config_file)
    document = read(path)
    return mp_yaml.stored(document).recipe is not None or settings.nearest(path).recipe is not None
