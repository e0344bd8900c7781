"""Measure what the agreement of all ranks adds to a step, with simulated ranks and a real TCPStore.

    python benchmarks/consensus.py [--ranks 2 64 512 4096] [-o benchmarks/results/consensus.json]

The store is that of torch.distributed, in a process of its own. Each rank is a thread with a connection of its own, in
one of a few processes. They all arrive at once; the time is from the last arrival to the last rank that has the
result. All ranks share the cores of this machine, which they do not in a real run, so the times are upper bounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpguard.runtime.proof import consensus
from mpguard.runtime.proof.consensus import Report
from mpguard.runtime.proof.reductions import Fingerprint

#: Most threads of a process, and how many of them connect at once: more overflow the queue of the server's socket.
THREADS, CONNECTING = 1024, 128

#: torch looks up the name of the server too, once per connection. A name server that does not answer costs a second.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_current = threading.local()

#: The gradients of a model in 16 parts.
SAME = Fingerprint({f"layers.{part}.weight": (1.0, 0.5) for part in range(16)})


def serve(port: Any, done: Any) -> None:
    """Host the store until `done` is set.

    torch's server looks up the name of each client, one after the other. On a socket that it opens itself their address
    is ::ffff:127.0.0.1, which only a name server knows; if that does not answer, thousands of time-outs add up.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=THREADS) as listener:
        address = listener.getsockname()
        store = dist.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    port.put(store.port)
    done.wait()


def simulate(ranks: range, given: tuple[int, int, int], barrier: Any, results: Any) -> None:
    """Run some ranks as threads; put when each arrived and when it had the result, for each round.

    given: the number of all ranks, the port of the store, and the number of rounds.
    """
    size, port, rounds = given
    consensus.rank = lambda: int(_current.rank)
    consensus.world_size = lambda: (size, size)
    consensus.default_store = lambda: _current.store
    with ThreadPoolExecutor(CONNECTING) as pool:
        stores = list(pool.map(lambda _: dist.TCPStore("127.0.0.1", port, is_master=False), ranks))
    start = threading.Barrier(len(ranks), action=barrier.wait)
    times: list[tuple[int, float, float]] = []

    def run(rank: int) -> None:
        _current.rank = rank
        _current.store = dist.PrefixStore("default", stores[rank - ranks[0]])
        for number in range(rounds):
            failures = ["a failure"] if number == rounds - 1 and rank == size - 1 else []
            start.wait()
            arrived = time.monotonic()
            found = consensus.agree(str(number), Report(failures, SAME, 2), 60.0)
            times.append((number, arrived, time.monotonic()))
            expected = [f"rank {size - 1}: a failure"] if number == rounds - 1 else []
            assert found == consensus.Agreement(expected, [], 2), found

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(times)


def measured(size: int, rounds: int) -> dict[str, float]:
    """Return the seconds that agreements of so many ranks took; the first round connects, the last has a failure."""
    context = multiprocessing.get_context("spawn")
    port, done, results = context.Queue(), context.Event(), context.Queue()
    server = context.Process(target=serve, args=(port, done))
    server.start()
    parts = [range(first, min(first + THREADS, size)) for first in range(0, size, THREADS)]
    barrier, number = context.Barrier(len(parts)), port.get()
    workers = [
        context.Process(target=simulate, args=(part, (size, number, rounds), barrier, results)) for part in parts
    ]
    for worker in workers:
        worker.start()
    times = [each for _ in workers for each in results.get()]
    for worker in workers:
        worker.join()
    done.set()
    server.join()
    taken = [
        max(end for at, _, end in times if at == number) - max(arrived for at, arrived, _ in times if at == number)
        for number in range(rounds)
    ]
    return {
        "in_force_median": round(statistics.median(taken[1:-1]), 3),
        "in_force_worst": round(max(taken[1:-1]), 3),
        "with_a_failure": round(taken[-1], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "consensus.json")
    options = parser.parse_args()
    seconds = {}
    for size in options.ranks:
        seconds[str(size)] = measured(size, options.rounds)
        print(f"{size:6} ranks  {seconds[str(size)]}", flush=True)
    result = {
        "what": "agreement of all ranks, from the last arrival to the last result",
        "unit": "s",
        "rounds": options.rounds,
        "seconds_by_ranks": seconds,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": {"cores": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
