import os
import time
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy

from lit.data import load_split
from lit.model import Block, Config, GPT, chunked_cross_entropy

eval_interval = 100
save_interval = 400
eval_iters = 50
log_interval = 10
devices = 1
learning_rate = 3e-5
batch_size = 16
micro_batch_size = 4
gradient_accumulation_iters = batch_size // micro_batch_size
max_iters = 2000
weight_decay = 0.02


def setup(data_dir="data/alpaca", checkpoint_dir="checkpoints/pythia-160m", out_dir="out/full", precision="16-mixed"):
    if devices > 1:
        strategy = FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block}, state_dict_type="full")
    else:
        strategy = "auto"
    fabric = L.Fabric(devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    main(fabric, Path(data_dir), Path(checkpoint_dir), Path(out_dir))


def main(fabric, data_dir, checkpoint_dir, out_dir):
    fabric.seed_everything(1337 + fabric.global_rank)
    if fabric.global_rank == 0:
        os.makedirs(out_dir, exist_ok=True)
    train_data = load_split(data_dir / "train.pt")
    val_data = load_split(data_dir / "test.pt")
    config = Config.from_name(checkpoint_dir.name)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    model.load_state_dict(torch.load(checkpoint_dir / "lit_model.pth", map_location="cpu"), strict=True)
    fabric.print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")
    model = fabric.setup_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    optimizer = fabric.setup_optimizers(optimizer)
    train(fabric, model, optimizer, train_data, val_data, out_dir)
    fabric.save(out_dir / "lit_model_finetuned.pth", {"model": model})


def train(fabric, model, optimizer, train_data, val_data, out_dir):
    step_count = 0
    t0 = time.perf_counter()
    for iter_num in range(1, max_iters + 1):
        input_ids, targets = get_batch(fabric, train_data)
        is_accumulating = iter_num % gradient_accumulation_iters != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(input_ids)
            loss = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])
            (loss / gradient_accumulation_iters).backward()
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
            step_count += 1
        if iter_num % log_interval == 0:
            fabric.print(f"iter {iter_num} step {step_count} loss {loss.item():.4f} time {time.perf_counter() - t0:.1f}s")
        if not is_accumulating and step_count % eval_interval == 0:
            val_loss = validate(fabric, model, val_data)
            fabric.print(f"step {step_count}: val loss {val_loss:.4f}")
            fabric.barrier()
        if not is_accumulating and step_count % save_interval == 0:
            fabric.save(out_dir / f"iter-{iter_num:06d}-ckpt.pth", {"model": model})


@torch.no_grad()
def validate(fabric, model, val_data):
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        input_ids, targets = get_batch(fabric, val_data)
        losses[k] = chunked_cross_entropy(model(input_ids)[..., :-1, :], targets[..., 1:]).item()
    model.train()
    return losses.mean()


def get_batch(fabric, data):
    ix = torch.randint(len(data), (micro_batch_size,))
    ids = [data[i]["input_ids"].type(torch.int64) for i in ix]
    labels = [data[i]["labels"].type(torch.int64) for i in ix]
    n = max(len(s) for s in ids)
    x = torch.stack([torch.nn.functional.pad(s, (0, n - len(s))) for s in ids])
    y = torch.stack([torch.nn.functional.pad(s, (0, n - len(s)), value=-1) for s in labels])
    return fabric.to_device((x, y))


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    from jsonargparse import CLI

    CLI(setup)
