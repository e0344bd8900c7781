import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sft.config import SFTConfig, parse_argv
from sft.data import setup_dataloader
from sft.model import forward, setup_model


def train(config: SFTConfig):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision("high")

    model = setup_model(config.model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if config.model.compile:
        for layer in model.model.layers:
            layer.compile()

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay,
                                  betas=(0.9, 0.95))
    loader = iter(setup_dataloader(config.data, dist.get_rank(), dist.get_world_size()))
    accum = config.data.batch_size // (config.data.micro_batch_size * dist.get_world_size())

    for step in range(config.max_steps):
        t0 = time.time()
        batch_loss = torch.zeros((), device="cuda")
        for _ in range(accum):
            micro = next(loader)
            input_ids = micro["input_ids"].cuda()
            position_ids = micro["position_ids"].cuda()
            target_ids = micro["target_ids"].cuda()
            loss_mask = micro["loss_mask"].cuda()

            logits = forward(model, input_ids, position_ids)
            B, L, V = logits.shape
            loss = F.cross_entropy(logits.view(-1, V), target_ids.view(-1), reduction="none").view(B, L)
            loss = loss[loss_mask].mean() / accum
            del logits
            loss.backward()
            batch_loss += loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            mem = torch.cuda.max_memory_allocated() / 2 ** 30
            print(f"step {step} | loss {batch_loss.item():.4f} | norm {grad_norm.item():.3f} | "
                  f"{time.time() - t0:.2f}s | peak {mem:.1f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(parse_argv())
