import json
import os
import sys

import torch
import torch.distributed as dist
import yaml
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer

from engine import FSDPEngine


class Trajectories(Dataset):
    def __init__(self, path, tokenizer, max_length):
        with open(path) as f:
            rows = [json.loads(line) for line in f]
        self.rows = sorted(rows, key=lambda r: r["instance_id"])
        self.tok, self.max_length = tokenizer, max_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = self.tok.apply_chat_template(self.rows[i]["messages"], tokenize=True, return_dict=False)[:self.max_length]
        ids = torch.tensor(ids)
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def main(path):
    with open(path) as f:
        cfg = yaml.safe_load(f)
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tok = AutoTokenizer.from_pretrained(cfg["actor"]["path"])
    ds = Trajectories(cfg["train_dataset"]["path"], tok, cfg["train_dataset"]["max_length"])
    sampler = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, batch_size=cfg["train_dataset"]["batch_size"], sampler=sampler)
    acc = cfg["gradient_accumulation_steps"]
    engine = FSDPEngine(cfg["actor"])
    engine.create_model()
    engine.parallelize()
    engine.create_optimizer(len(loader) // acc * cfg["total_train_epochs"])
    for epoch in range(cfg["total_train_epochs"]):
        engine.model.train()
        for i, batch in enumerate(loader):
            loss = engine.forward_backward(batch, 1.0 / acc)
            if (i + 1) % acc == 0:
                norm = engine.step()
                if dist.get_rank() == 0:
                    print(f"epoch {epoch} step {(i + 1) // acc} loss {loss.item():.4f} grad_norm {float(norm):.3f}")
    os.makedirs(cfg["saver"], exist_ok=True)
    engine.save(os.path.join(cfg["saver"], "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
