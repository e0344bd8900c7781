"""End with collectives, so that a gloo thread waits for the GIL when Python shuts down, and gets it during shutdown.

The program makes this likely: the results of a hundred collectives are dropped, the interpreter gives the GIL to no
other thread before its shutdown, and the destructor of an object releases it during the shutdown. With --activate,
mpguard is activated; `mpguard.run` releases the GIL when the script has ended in any case.
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
