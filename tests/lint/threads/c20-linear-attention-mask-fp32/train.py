import argparse
import json
import random

import deepspeed
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from linear_attention import LinearTransformerLM


class MLMDataset(Dataset):
    def __init__(self, path, vocab, mask_id=4, p=0.15):
        self.rows = [json.loads(l)["ids"] for l in open(path)]
        self.vocab, self.mask_id, self.p = vocab, mask_id, p

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = torch.tensor(self.rows[i])
        lab = torch.full_like(ids, -100)
        m = torch.rand(len(ids)) < self.p
        lab[m] = ids[m]
        ids = ids.masked_fill(m, self.mask_id)
        return ids, lab


def collate(b):
    ids, lab = zip(*b)
    return (pad_sequence(ids, True), torch.tensor([len(i) for i in ids]), pad_sequence(lab, True, -100))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/train.jsonl")
    ap.add_argument("--vocab_size", type=int, default=32000)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--local_rank", type=int, default=-1)
    ap = deepspeed.add_config_arguments(ap)
    args = ap.parse_args()
    random.seed(0)
    model = LinearTransformerLM(args.vocab_size)
    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(),
                                                training_data=MLMDataset(args.data, args.vocab_size),
                                                collate_fn=collate)
    for epoch in range(args.epochs):
        for step, (ids, lens, lab) in enumerate(loader):
            loss = engine(ids.to(engine.device), lens.to(engine.device), lab.to(engine.device))
            engine.backward(loss)
            engine.step()
            if step % 50 == 0 and engine.local_rank in (-1, 0):
                print(epoch, step, loss.item())
        engine.save_checkpoint("ckpt", tag=f"e{epoch}")


if __name__ == "__main__":
    main()
