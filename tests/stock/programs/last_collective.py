"""Ends with collectives; a gloo thread wants the GIL when Python shuts down, and gets it while it does.

A coincidence made likely: a hundred times nobody keeps what a collective returns, the interpreter gives the GIL to no
other thread before its shutdown, and something that is left behind gives it away during that. With --activate,
mpguard is asked to be there; `mpguard.run` alone gives the GIL away when the script has ended.
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
if "--activate" in sys.argv:
    import mpguard

    mpguard.activate("bf16_mixed", enforce="off")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("the collectives are left", flush=True)
sys.setswitchinterval(100)
for _ in range(100):
    dist.all_reduce(torch.ones(1), async_op=True)
end = time.monotonic() + 0.1
while time.monotonic() < end:
    pass
