import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer

from workers.fsdp_engine import FSDPEngineWithLMHead


class SFTDataset(Dataset):
    def __init__(self, path, tokenizer, max_length):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]
        self.tok, self.max_length = tokenizer, max_length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        prompt = self.tok(self.rows[i]["question"] + "\n")["input_ids"]
        answer = self.tok(self.rows[i]["answer"])["input_ids"] + [self.tok.eos_token_id]
        ids = (prompt + answer)[:self.max_length]
        pad = self.max_length - len(ids)
        mask = ([0] * len(prompt) + [1] * len(answer))[:self.max_length] + [0] * pad
        return {"input_ids": torch.tensor(ids + [self.tok.pad_token_id] * pad), "loss_mask": torch.tensor(mask).float(),
                "attention_mask": torch.tensor([1] * len(ids) + [0] * pad),
                "position_ids": torch.arange(self.max_length).clamp(max=len(ids) - 1)}


def sft_loss(logits, ids, mask):
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    m = mask[:, 1:].flatten()
    return (nll * m).sum() / m.sum().clamp(min=1)


def main(path):
    with open(path) as f:
        cfg = yaml.safe_load(f)
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tok = AutoTokenizer.from_pretrained(cfg["model"]["path"])
    ds = SFTDataset(cfg["data"]["train_files"], tok, cfg["data"]["max_length"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=cfg["data"]["micro_batch_size"] * 4, sampler=sampler, drop_last=True)
    engine = FSDPEngineWithLMHead(cfg["model"], cfg["engine"], cfg["optim"])
    engine.initialize()
    for epoch in range(cfg["trainer"]["total_epochs"]):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            n = cfg["data"]["micro_batch_size"]
            micro = [{k: v[i:i + n] for k, v in batch.items()} for i in range(0, len(batch["input_ids"]), n)]
            engine.optimizer.zero_grad()
            loss = engine.forward_backward_batch(micro, sft_loss)
            norm = engine.optimizer_step()
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} grad_norm {norm:.3f}")
        os.makedirs(cfg["trainer"]["default_local_dir"], exist_ok=True)
        engine.save_checkpoint(os.path.join(cfg["trainer"]["default_local_dir"], f"epoch_{epoch}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
