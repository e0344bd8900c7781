import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig

out_dir = "out"
init_from = "scratch"
eval_interval = 1000
eval_iters = 100
dataset = "openwebtext"
gradient_accumulation_steps = 1
batch_size = 12
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
learning_rate = 6e-4
max_iters = 600000
weight_decay = 1e-2
grad_clip = 1.0
warmup_iters = 2000
min_lr = 6e-5
backend = "nccl"
device = "cuda"
dtype = "bfloat16"
compile = False
exec(open("configurator.py").read())

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    master_process, seed_offset = int(os.environ["RANK"]) == 0, int(os.environ["RANK"])
else:
    master_process, seed_offset = True, 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

data_dir = os.path.join("data", dataset)
splits = {s: np.memmap(os.path.join(data_dir, s + ".bin"), dtype=np.uint16, mode="r") for s in ("train", "val")}


def get_batch(split):
    data = splits[split]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


model_args = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size)
iter_num = 0
if init_from == "resume":
    ckpt = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model_args, iter_num = ckpt["model_args"], ckpt["iter_num"]
model = GPT(GPTConfig(**model_args)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.95))
if init_from == "resume":
    model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
raw_model = model
if compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[local_rank])


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in splits:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with ctx:
                losses[k] = model(*get_batch(split))[1].item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, (it - warmup_iters) / (max_iters - warmup_iters)))) * (learning_rate - min_lr)


X, Y = get_batch("train")
t0 = time.time()
while True:
    for g in optimizer.param_groups:
        g["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        print(iter_num, estimate_loss())
        torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": model_args,
                    "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    optimizer.zero_grad(set_to_none=True)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
        X, Y = get_batch("train")
        (loss / gradient_accumulation_steps).backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    if iter_num % 10 == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(time.time() - t0) * 1000:.1f}ms")
        t0 = time.time()
    iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
