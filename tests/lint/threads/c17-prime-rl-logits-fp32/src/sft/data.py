import torch
from datasets import load_dataset
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer


class PackedSFT(IterableDataset):
    def __init__(self, cfg, rank, world):
        self.tok = AutoTokenizer.from_pretrained(cfg.tokenizer)
        self.ds = load_dataset(cfg.name, split="train").shard(world, rank)
        self.L = cfg.seq_len

    def __iter__(self):
        ids, mask, pos = [], [], []
        while True:
            for ex in self.ds:
                p = self.tok.apply_chat_template(ex["prompt"], add_generation_prompt=True)
                full = self.tok.apply_chat_template(ex["prompt"] + ex["completion"])
                ids += full
                mask += [0] * len(p) + [1] * (len(full) - len(p))
                pos += list(range(len(full)))
                if len(ids) > self.L:
                    yield {"input_ids": torch.tensor(ids[: self.L]), "target_ids": torch.tensor(ids[1: self.L + 1]),
                           "position_ids": torch.tensor(pos[: self.L]),
                           "loss_mask": torch.tensor(mask[1: self.L + 1], dtype=torch.bool)}
                    ids, mask, pos = [], [], []


def setup_dataloader(cfg, rank, world):
    return DataLoader(PackedSFT(cfg, rank, world), cfg.micro_batch_size)
