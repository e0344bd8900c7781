import json

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from fnet import FNetForPreTraining


class MLMDataset(Dataset):
    def __init__(self, path, config, seq_len=512, p=0.15):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.seq_len, self.p, self.config = seq_len, p, config

    def __len__(self):
        return len(self.tokens) // self.seq_len

    def __getitem__(self, i):
        ids = torch.from_numpy(self.tokens[i * self.seq_len:(i + 1) * self.seq_len].astype(np.int64))
        labels = ids.clone()
        picked = torch.rand(ids.shape) < self.p
        labels[~picked] = -100
        ids[picked] = self.config["mask_token_id"]
        return ids, torch.zeros_like(ids), labels


def main():
    with open("config.json") as f:
        config = json.load(f)
    device = torch.device("cuda")
    model = FNetForPreTraining(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.01)
    scaler = torch.cuda.amp.GradScaler(enabled=config["fp16"])
    loader = DataLoader(MLMDataset("data/train.bin", config), batch_size=config["batch_size"], shuffle=True,
                        num_workers=4, drop_last=True)
    step = 0
    while step < config["steps"]:
        for ids, types, labels in loader:
            ids, types, labels = ids.to(device), types.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.cuda.amp.autocast(enabled=config["fp16"]):
                logits = model(ids, types)
                loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            step += 1
            if step % 100 == 0:
                print(step, loss.item())
            if step % 10000 == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "scaler": scaler.state_dict(), "step": step}, f"fnet_{step}.pt")
            if step >= config["steps"]:
                break


if __name__ == "__main__":
    main()
