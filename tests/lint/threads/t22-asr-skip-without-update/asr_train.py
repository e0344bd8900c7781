import logging
import os
import sys

import torch
import yaml
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from asr.model import ASRModel
from asr.trainer import Trainer


class Dump(Dataset):
    def __init__(self, path):
        self.items = torch.load(path)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]["feats"], self.items[i]["ids"]


def collate(items):
    x, y = zip(*items)
    return {"speech": pad_sequence(x, batch_first=True), "speech_lens": torch.tensor([len(a) for a in x]),
            "text": pad_sequence(y, batch_first=True, padding_value=-1), "text_lens": torch.tensor([len(a) for a in y])}


def main(path):
    logging.basicConfig(level=logging.INFO)
    with open(path) as f:
        cfg = yaml.safe_load(f)
    model = ASRModel(cfg).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=cfg["optim"]["lr"])
    w = cfg["warmup_steps"]
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: w ** 0.5 * min((s + 1) ** -0.5, (s + 1) * w ** -1.5))
    loader = DataLoader(Dump(cfg["data"]), batch_size=cfg["batch_size"], shuffle=True, collate_fn=collate, num_workers=4)
    trainer = Trainer(model, opt, sched, cfg)
    os.makedirs(cfg["exp_dir"], exist_ok=True)
    for epoch in range(cfg["max_epoch"]):
        if trainer.train_one_epoch(loader):
            logging.warning("The gradients at all steps are invalid in this epoch.")
            break
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "scheduler": sched.state_dict(),
                    "scaler": trainer.scaler.state_dict() if trainer.scaler else None, "epoch": epoch},
                   os.path.join(cfg["exp_dir"], "checkpoint.pth"))


if __name__ == "__main__":
    main(sys.argv[1])
