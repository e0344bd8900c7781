"""A script that starts its own processes, as torch, accelerate and `multiprocessing` do it: none sets RANK."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys

import torch
import torch.distributed as dist

import mpguard

# As in a build of torch with CUDA, where the parent has counted the GPUs: its forked processes can use the CPU.
parent = os.getpid()
torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent

mpguard.activate("bf16_mixed", proof_json="proof.json")


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    enabled = "--fp32" not in sys.argv or rank == 0
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(json.dumps({"rank": rank, "world": dist.get_world_size()}) + "\n")  # in one call: ranks share it
    sys.stdout.flush()
    dist.destroy_process_group()


def worker(rank: int, world: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    train(rank)


def launched() -> None:
    """Train in a process of accelerate's `debug_launcher`, which has created the process group."""
    train(dist.get_rank())


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(worker, (2, port), nprocs=2)
    elif sys.argv[1] == "debug_launcher":
        import accelerate

        accelerate.debug_launcher(launched, num_processes=2)
    else:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=worker, args=(rank, 2, port)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(process.exitcode or 0 for process in processes))
