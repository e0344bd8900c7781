import time

import fire
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from model import GPT

GPT_1B = dict(vocab_size=50304, max_seq_len=1024, n_layers=48, n_heads=25, d_embd=1600)


class TokenBin(Dataset):
    def __init__(self, path, seq_len):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.seq_len = seq_len

    def __len__(self):
        return (len(self.data) - 1) // self.seq_len

    def __getitem__(self, i):
        s = i * self.seq_len
        chunk = torch.from_numpy(self.data[s:s + self.seq_len + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


def is_float8_target(mod, fqn):
    return isinstance(mod, torch.nn.Linear) and mod.in_features % 16 == 0 and mod.out_features % 16 == 0


def train(data="data/train.bin", bsz=12, n_steps=2000, lr=2.5e-4, use_float8=True, log_every=20):
    torch.manual_seed(3985)
    device = torch.device("cuda")
    model = GPT(**GPT_1B).to(device)
    if use_float8:
        convert_to_float8_training(model, config=Float8LinearConfig(), module_filter_fn=is_float8_target)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=n_steps)
    loader = DataLoader(TokenBin(data, GPT_1B["max_seq_len"]), batch_size=bsz, shuffle=True, num_workers=4,
                        drop_last=True, pin_memory=True)

    model.train()
    step, t0 = 0, time.perf_counter()
    while step < n_steps:
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % log_every == 0:
                torch.cuda.synchronize()
                dt = (time.perf_counter() - t0) / log_every
                print(f"step {step} loss {loss.item():.3f} {dt * 1e3:.1f} ms/step")
                t0 = time.perf_counter()
            if step == n_steps:
                break
    torch.save(model._orig_mod.state_dict(), "gpt1b_fp8.pt")


if __name__ == "__main__":
    fire.Fire(train)
