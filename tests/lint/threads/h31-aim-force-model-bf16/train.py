import torch
from torchvision import datasets, transforms
from transformers import HfArgumentParser, TrainingArguments
from dataclasses import dataclass, field

from models.aim import AiM
from trainer import AiMTrainer


@dataclass
class AimArguments:
    dataset_path: str = field(default="data/imagenet/train")
    image_size: int = field(default=256)
    depth: int = field(default=24)


def collate(batch):
    return {
        "pixel_values": torch.stack([b[0] for b in batch]),
        "labels": torch.tensor([b[1] for b in batch]),
    }


def main():
    aim_args, training_args = HfArgumentParser((AimArguments, TrainingArguments)).parse_args_into_dataclasses()
    tf = transforms.Compose([
        transforms.Resize(aim_args.image_size), transforms.CenterCrop(aim_args.image_size),
        transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3),
    ])
    train_set = datasets.ImageFolder(aim_args.dataset_path, tf)
    trainer = AiMTrainer(
        model=AiM(depth=aim_args.depth), args=training_args, train_dataset=train_set, data_collator=collate
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
