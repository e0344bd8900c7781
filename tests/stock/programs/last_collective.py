"""Ends with a collective; a gloo thread wants the GIL when Python shuts down, and gets it while it does.

A rare coincidence made certain: the interpreter gives the GIL to no other thread between the collective and
its end, and something that is left behind gives it away during shutdown.
"""

import sys
import time

import torch
import torch.distributed as dist


class LeftBehind:
    sleep = time.sleep

    def __del__(self) -> None:
        self.sleep(0.3)


left = LeftBehind()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("one collective is left", flush=True)
sys.setswitchinterval(100)
dist.all_reduce(torch.ones(1), async_op=True)
end = time.monotonic() + 0.1
while time.monotonic() < end:
    pass
