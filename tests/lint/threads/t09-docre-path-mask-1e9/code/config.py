from dataclasses import dataclass


@dataclass
class Config:
    pretrained: str = "bert-base-cased"
    train_file: str = "data/prepro/train.pt"
    dev_file: str = "data/prepro/dev.pt"
    num_relations: int = 97
    batch_size: int = 4
    lr: float = 3e-5
    epochs: int = 30
    fp16: bool = True
    max_grad_norm: float = 1.0
    save: str = "checkpoint/mpr.pt"
