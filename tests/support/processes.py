"""Start the programs that a user would start, and read their output."""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any, NoReturn

from limits import seconds

BIN = Path(sys.executable).parent

#: A function that a fork runs: it takes the words of a command line and returns a status.
Program = Callable[[list[str]], int]

#: Prefixes of variables that an outer run, or a hook, may have set.
_LAUNCH_VARIABLES = ("MPGUARD_", "ACCELERATE_", "FSDP_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")


def environment(**more: str) -> dict[str, str]:
    """Return an environment without variables of a launch; one thread per process, DeepSpeed on the CPU."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH_VARIABLES)}
    return {**clean, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "NO_COLOR": "1", **more}


#: Ports for tests, below those that the system gives to outgoing connections; processes that run at the
#: same time begin thousands of ports apart.
_PORTS = range(12_000, 32_000)
_next_port = itertools.count(os.getpid() * 7919)


def free_port() -> int:
    """Return a port on which nothing listens, and which this process has not returned before."""
    while True:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def mp_yaml(
    folder: Path, name: str = "mp.yaml", *, recipe: str | None = "bf16_mixed", text: str = "", **keys: Any
) -> Path:
    """Write an mp.yaml for one process on the CPU in BF16, with some keys changed; None leaves a key out."""
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "'NO'",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": "true",
        "main_process_port": free_port(),
        "fp8_config": f"{{mpguard_recipe: {recipe}}}" if recipe else None,
        **keys,
    }
    lines = [f"{key}: {value}" for key, value in fields.items() if value is not None]
    path = folder / name
    path.write_text("\n".join(lines) + "\n" + text, encoding="utf-8")
    return path


def command(
    program: str, *arguments: object, cwd: Path, timeout: float | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment to its end."""
    words = [str(BIN / program), *map(str, arguments)]
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout or seconds(120),
        check=False,
    )


def torchrun(*arguments: object, cwd: Path, processes: int = 2, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc_per_node N ...` on a free port."""
    flags = ("--nproc_per_node", processes, "--master_port", free_port())
    return command("torchrun", *flags, *arguments, cwd=cwd, **more)


@contextlib.contextmanager
def started(
    program: str, *arguments: object, cwd: Path, errors: IO[str] | int = subprocess.DEVNULL, **more: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a program in its own process group; kill it with all its children at the end of the block."""
    words = [str(BIN / program), *map(str, arguments)]
    process = subprocess.Popen(
        words, cwd=cwd, env=environment(**more), stdout=subprocess.PIPE, stderr=errors,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


#: What scripts of this process have left behind. A fork ends before any of it is destroyed, by `os._exit`: a process
#: group of gloo would wait, with the GIL, for a thread of its own that needs the GIL.
_LEFT_BEHIND: list[dict[str, Any]] = []

_SERVER = multiprocessing.get_context("forkserver")
#: What programs import, so that each fork has it at once; missing ones are left out by the server. Where a GPU is,
#: some of them initialize CUDA, which no fork can use after that.
_PRELOADED = ["torch", "accelerate", "mpguard.run"]
if not Path("/dev/nvidiactl").exists():
    _PRELOADED += [
        "torch._dynamo", "torch._functorch.aot_autograd", "torch._functorch.compilers", "torch._inductor.lowering",
        "torch._inductor.pattern_matcher", "torch._dynamo.repro.after_aot", "torch._dynamo.testing",
        "torch.export._trace", "torchao.float8", "transformers.trainer", "deepspeed",
    ]  # fmt: skip
_SERVER.set_forkserver_preload([*_PRELOADED, "fork_server"])
_STARTING = threading.Lock()


def run_module(words: list[str]) -> int:
    """Run `python -m mpguard.run WORDS` in this process."""
    from mpguard import run

    return run.main(words)


def in_fork(
    arguments: Sequence[object], *, cwd: Path, timeout: float | None = None, program: Program = run_module, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m mpguard.run ARGUMENTS`, or another program, in a fork of a server that has imported torch.

    Nothing else has run in that server. This process cannot be forked: the threads that torch has started here would
    be missing in the fork, which would wait for them for ever.
    """
    with _STARTING:  # the threads of `ranks_in_fork`
        _start_server()
    words, limit = [str(word) for word in arguments], timeout or seconds(120)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = _SERVER.Process(target=_run, args=(program, words, str(cwd), environment(**more), (out, err)))
        child.start()
        child.join(limit)
        if child.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGUSR1)  # it writes its stacks
            child.join(2)
            child.kill()
            raise AssertionError(f"not ended after {limit:.0f} s:\n{out.read_text('utf-8')}{err.read_text('utf-8')}")
        return subprocess.CompletedProcess(words, child.exitcode, out.read_text("utf-8"), err.read_text("utf-8"))


@functools.cache
def _start_server() -> None:
    """Start the server where it finds the modules of this folder: it is not told `sys.path`."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def ranks_in_fork(
    arguments: Sequence[object],
    *,
    cwd: Path,
    processes: int = 2,
    timeout: float | None = None,
    program: Program = run_module,
    **more: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Call `in_fork` once per rank, with the variables of torchrun but without its agent: rank 0 hosts the store."""
    port = str(free_port())

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        variables = {**more, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return in_fork(arguments, cwd=cwd, timeout=timeout, program=program, **variables)

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        runs = [pool.submit(start, rank) for rank in range(processes)]
        errors = [f"rank {rank}: {error}" for rank, run in enumerate(runs) if (error := run.exception())]
    assert not errors, "\n".join(errors)
    return [run.result() for run in runs]


def newer(library: str, folder: Path) -> str:
    """Return a path to put on `sys.path`, on which an installed library seems to be version 99.0."""
    metadata = folder / "newer" / f"{library}-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: 99.0\n")
    return str(metadata.parents[1])


def run_python(words: list[str]) -> int:
    """Run `python WORDS` in this process: a script, a module behind `-m`, or code behind `-c`."""
    if words[:2] == ["-m", "mpguard.run"]:
        return run_module(words[2:])
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return 0
    if words[0] == "-m":
        sys.argv = words[1:]
        _LEFT_BEHIND.append(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
        return 0
    sys.path[0] = str(Path(words[0]).resolve().parent)
    return run_file(words)


def run_file(words: list[str]) -> int:
    """Run a script in this process, which does not get the script's folder on its path."""
    sys.argv = words
    _LEFT_BEHIND.append(runpy.run_path(words[0], run_name="__main__"))
    return 0


def launch(
    *arguments: object, cwd: Path, timeout: float | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `mpguard launch ARGUMENTS` in a fork; the workers that it starts are new processes."""
    return in_fork(["launch", *arguments], cwd=cwd, timeout=timeout, program=_run_mpguard, **more)


def _run_mpguard(words: list[str]) -> int:
    from mpguard.cli import main

    return main(words)


def launch_in_forks(
    *arguments: object, cwd: Path, timeout: float | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `mpguard launch ARGUMENTS` in a fork, with accelerate's launcher: the workers that it starts are forks."""
    return in_fork(["launch", *arguments], cwd=cwd, timeout=timeout, program=_run_mpguard_with_forks, **more)


def _run_mpguard_with_forks(words: list[str]) -> int:
    _start_workers_as_forks()
    return _run_mpguard(words)


def accelerate_with_forks(words: list[str]) -> int:
    """Run `accelerate launch WORDS`, for `in_fork`; the workers that it starts are forks."""
    from accelerate.commands.launch import main

    _start_workers_as_forks()
    sys.argv = ["accelerate-launch", *words]
    main()
    return 0


def _start_workers_as_forks() -> None:
    import torch.distributed.run
    from accelerate.commands import launch

    torch.distributed.run.run = _fork_workers  # torchrun's agent
    launch.simple_launcher = _fork_worker


def _fork_worker(options: Any) -> None:
    """Run the only worker of a launch, with the command line and the variables that accelerate has for it."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    (_, *words), environment = prepare_simple_launcher_cmd_env(options)
    worker = os.fork()
    if not worker:
        os.environ.update(environment)
        _end_with(run_python, words)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))


def _fork_workers(options: Any) -> None:
    """Start the workers of a command line of torchrun with the variables that its agent sets, and wait for them."""
    words = [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]
    world = {"WORLD_SIZE": str(options.nproc_per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = []
    for rank in range(int(options.nproc_per_node)):
        workers.append(os.fork())
        if not workers[-1]:
            os.environ.update({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            _end_with(run_python, words)
    statuses = [os.waitpid(worker, 0)[1] for worker in workers]
    sys.exit(int(any(statuses)))


def on_ranks(
    *arguments: object, cwd: Path, processes: int = 2, timeout: float | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc_per_node N ARGUMENTS` without its agent, in forks; the output of all ranks is one text."""
    ended = ranks_in_fork(arguments, cwd=cwd, processes=processes, timeout=timeout, program=run_python, **more)
    output, errors = ("".join(getattr(each, name) for each in ended) for name in ("stdout", "stderr"))
    status = next((each.returncode for each in ended if each.returncode), 0)
    return subprocess.CompletedProcess(ended[0].args, status, output, errors)


def _run(program: Program, words: list[str], cwd: str, variables: dict[str, str], output: tuple[Path, Path]) -> None:
    """Run a program in the fork, with its output in files."""
    for number, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    faulthandler.register(signal.SIGUSR1)  # all threads, on the standard error
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    _hide_objects_of_server()
    _end_with(program, words)


def _hide_objects_of_server() -> None:
    """Let a program see no frozen objects until it freezes some: those that the server has frozen are not its own.

    mpguard looks among frozen objects too, if there are any. `gc.get_freeze_count` counts them one by one.
    """
    count, freeze = gc.get_freeze_count, gc.freeze

    def freeze_by_program() -> None:
        gc.get_freeze_count = count
        freeze()

    gc.get_freeze_count, gc.freeze = (lambda: 0), freeze_by_program


def _end_with(program: Program, words: list[str]) -> NoReturn:
    """Run a program, and end this process with its status, as an interpreter would."""
    status = 99
    try:
        status = program(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def results(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the lines of JSON that a program printed, in the order of ranks."""
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"rank"')]
    return sorted(lines, key=lambda line: line["rank"])


def proof(path: Path) -> Mapping[str, Any]:
    """Read a proof file, with its rows by name."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {**data, "rows": {row["name"]: row for row in data["rows"]}}


def transcript(run: subprocess.CompletedProcess[str]) -> str:
    """Return status, stdout and stderr of a run, for the message of a failed assertion."""
    return f"status {run.returncode}\n{run.stdout[-3000:]}\n{run.stderr[-5000:]}"
