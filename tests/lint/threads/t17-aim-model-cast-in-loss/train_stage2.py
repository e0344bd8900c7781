import argparse
import os
from datetime import datetime

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from transformers import TrainingArguments

from models import AiM_models
from trainer import Stage2Trainer, collate_fn


def build_dataset(path, size=256):
    tf = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    return ImageFolder(os.path.join(path, "train"), transform=tf)


def create_training_arguments(args):
    return TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        weight_decay=0.05,
        adam_beta1=0.9,
        adam_beta2=0.95,
        per_device_train_batch_size=args.batch_size,
        dataloader_num_workers=args.num_workers,
        save_strategy="steps",
        save_total_limit=1,
        bf16=True,
        ddp_find_unused_parameters=False,
        gradient_accumulation_steps=args.grad_accum,
        report_to="none",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--aim-model", choices=list(AiM_models), default="AiM-B")
    parser.add_argument("--vq-ckpt", type=str)
    parser.add_argument("--dataset", type=str)
    parser.add_argument("--output-dir", type=str, default="./checkpoints")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--num-workers", type=int, default=24)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--grad-accum", type=int, default=1)
    args = parser.parse_args()
    args.output_dir = os.path.join(args.output_dir, f"{args.aim_model}_{datetime.now():%Y-%m-%d_%H-%M-%S}")

    model = AiM_models[args.aim_model]()
    if args.vq_ckpt:
        model.vqvae.load_state_dict(torch.load(args.vq_ckpt))
    trainer = Stage2Trainer(model, create_training_arguments(args), train_dataset=build_dataset(args.dataset),
                            data_collator=collate_fn)
    trainer.train()
