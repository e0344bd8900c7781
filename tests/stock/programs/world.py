"""Print the rank, world size, engine and precision of `Accelerator()`."""

import json
import os
import sys

import torch.distributed as dist
from accelerate import Accelerator

made = Accelerator()
found = {"rank": made.process_index, "world": made.num_processes, "engine": made.distributed_type.value}
sys.stdout.write(json.dumps({**found, "mode": made.mixed_precision}) + "\n")
sys.stdout.flush()
if dist.is_initialized():
    dist.barrier()  # rank 0 hosts the store
os._exit(0)  # S26
