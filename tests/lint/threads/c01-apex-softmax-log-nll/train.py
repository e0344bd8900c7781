import argparse
import json

import torch
from apex.fp16_utils import FP16_Optimizer, network_to_half
from torch.utils.data import DataLoader

from data import TaggingDataset, collate
from model import BiLSTMTagger, MixtureNLLLoss


def train_epoch(model, loader, criterion, optimizer, epoch, log_every):
    model.train()
    total = 0.0
    for step, (tokens, tags, prior) in enumerate(loader):
        tokens, tags, prior = tokens.cuda(), tags.cuda(), prior.cuda()
        optimizer.zero_grad()
        loss = criterion(model(tokens, prior.half()), tags)
        optimizer.backward(loss)
        optimizer.clip_master_grads(5.0)
        optimizer.step()
        total += loss.item()
        if step % log_every == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f} scale {optimizer.loss_scale}")
    return total / len(loader)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/train.jsonl")
    ap.add_argument("--vocab", default="data/vocab.json")
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    meta = json.load(open(args.vocab))
    ds = TaggingDataset(args.data, meta["vocab"], meta["tags"], meta["lexicon"])
    loader = DataLoader(ds, args.batch_size, shuffle=True, collate_fn=collate, num_workers=4)

    model = network_to_half(BiLSTMTagger(len(meta["vocab"]), len(meta["tags"])).cuda())
    criterion = MixtureNLLLoss().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)

    for epoch in range(args.epochs):
        avg = train_epoch(model, loader, criterion, optimizer, epoch, 50)
        print(f"epoch {epoch} mean loss {avg:.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"ckpt_{epoch}.pt")


if __name__ == "__main__":
    main()
