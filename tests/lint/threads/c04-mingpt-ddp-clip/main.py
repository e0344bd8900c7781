import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import random_split

from char_dataset import CharDataset
from model import GPT
from trainer import Trainer, TrainerConfig


def main():
    init_process_group(backend="nccl")
    ds = CharDataset("./data/input.txt", block_size=128, truncate=0.05)
    n = int(len(ds) * 0.9)
    train_set, test_set = random_split(ds, [n, len(ds) - n])
    model = GPT(ds.vocab_size, ds.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))
    Trainer(TrainerConfig(), model, optimizer, train_set, test_set).train()
    destroy_process_group()


if __name__ == "__main__":
    main()
