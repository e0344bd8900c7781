import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from config import Config
from data import DocRED, collate
from models.mpr import MPR


def run_dev(model, loader, device):
    model.eval()
    tp = fp = fn = 0
    with torch.no_grad():
        for batch, labels, pair_mask in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            pred = (model(**batch).sigmoid() > 0.5) & pair_mask.to(device).unsqueeze(-1)
            gold = labels.to(device).bool()
            tp += (pred & gold).sum().item()
            fp += (pred & ~gold).sum().item()
            fn += (~pred & gold).sum().item()
    return 2 * tp / max(1, 2 * tp + fp + fn)


def main():
    cfg = Config()
    device = torch.device("cuda")
    train = DataLoader(DocRED(cfg.train_file), batch_size=cfg.batch_size, shuffle=True, collate_fn=collate)
    dev = DataLoader(DocRED(cfg.dev_file), batch_size=cfg.batch_size, collate_fn=collate)
    model = MPR(cfg).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.fp16)
    best = 0.0
    for epoch in range(cfg.epochs):
        model.train()
        for batch, labels, pair_mask in train:
            batch = {k: v.to(device) for k, v in batch.items()}
            labels, pair_mask = labels.to(device), pair_mask.to(device)
            with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.fp16):
                logits = model(**batch)
                loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                loss = (loss * pair_mask.unsqueeze(-1)).sum() / (pair_mask.sum() * cfg.num_relations)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        f1 = run_dev(model, dev, device)
        print(f"epoch {epoch} loss {loss.item():.4f} f1 {f1:.4f}")
        if f1 > best:
            best = f1
            os.makedirs(os.path.dirname(cfg.save), exist_ok=True)
            torch.save(model.state_dict(), cfg.save)


if __name__ == "__main__":
    main()
