import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy
from torch.utils.data import DataLoader

wd = Path(__file__).parent.parent.resolve()
sys.path.append(str(wd))

from lit_gpt.data import AlpacaDataset, collate
from lit_gpt.model import GPT, Block, Config, chunked_cross_entropy

eval_interval, save_interval, log_interval = 600, 1000, 1
devices = 1
learning_rate = 3e-3
batch_size = 64 // devices
micro_batch_size = 1
gradient_accumulation_iters = batch_size // micro_batch_size
epoch_size = 50000
num_epochs = 5
max_iters = num_epochs * (epoch_size // micro_batch_size) // devices
weight_decay = 0.02
warmup_steps = 2 * (epoch_size // micro_batch_size) // devices // gradient_accumulation_iters


def get_default_supported_precision(training: bool) -> str:
    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported():
            return "bf16-mixed" if training else "bf16-true"
        return "16-mixed" if training else "16-true"
    return "bf16-mixed" if training else "bf16-true"


def setup(data_dir: Path = Path("data/alpaca"),
          checkpoint_dir: Path = Path("checkpoints/stabilityai/stablelm-base-alpha-3b"),
          out_dir: Path = Path("out/full/alpaca"), precision: str = None):
    precision = precision or get_default_supported_precision(training=True)
    strategy = FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block},
                            state_dict_type="full") if devices > 1 else "auto"
    fabric = L.Fabric(devices=devices, strategy=strategy, precision=precision)
    fabric.launch(main, data_dir, checkpoint_dir, out_dir)


def main(fabric, data_dir, checkpoint_dir, out_dir):
    fabric.seed_everything(1337)
    os.makedirs(out_dir, exist_ok=True)
    config = Config.from_checkpoint(checkpoint_dir)
    with torch.device("meta"):
        model = GPT(config)
    state = torch.load(checkpoint_dir / "lit_model.pth", mmap=True, map_location="cpu")
    model.load_state_dict(state, assign=True)
    fabric.print(f"Number of trainable parameters: {sum(p.numel() for p in model.parameters()):,}")
    model = fabric.setup_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(AlpacaDataset(data_dir / "train.pt"), micro_batch_size, shuffle=True,
                                                 collate_fn=collate))
    t = time.perf_counter()
    train(fabric, model, optimizer, loader, out_dir)
    fabric.print(f"Training time: {time.perf_counter() - t:.2f}s")
    fabric.print(f"Memory used: {torch.cuda.max_memory_allocated() / 1e9:.02f} GB")
    fabric.save(out_dir / "lit_model_finetuned.pth", {"model": model})


def train(fabric, model, optimizer, loader, out_dir):
    step_count, it = 0, iter(loader)
    for iter_num in range(max_iters):
        if step_count <= warmup_steps:
            for g in optimizer.param_groups:
                g["lr"] = learning_rate * step_count / warmup_steps
        try:
            ids, targets = next(it)
        except StopIteration:
            it = iter(loader)
            ids, targets = next(it)
        accumulating = (iter_num + 1) % gradient_accumulation_iters != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = chunked_cross_entropy(model(ids)[:, :-1], targets[:, 1:])
            fabric.backward(loss / gradient_accumulation_iters)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            step_count += 1
        if iter_num % log_interval == 0:
            fabric.print(f"iter {iter_num} step {step_count}: loss {loss.item():.4f}")
        if not accumulating and step_count % save_interval == 0:
            fabric.save(out_dir / f"iter-{iter_num:06d}-ckpt.pth", {"model": model})


if __name__ == "__main__":
    from jsonargparse import CLI

    CLI(setup)
