import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def build_loaders(root, batch_size):
    train_tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    val_tf = transforms.Compose([
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    train = datasets.ImageFolder(f"{root}/train", train_tf)
    val = datasets.ImageFolder(f"{root}/val", val_tf)
    return (
        DataLoader(train, batch_size, shuffle=True, num_workers=8, drop_last=True, pin_memory=True),
        DataLoader(val, batch_size, num_workers=8, pin_memory=True),
        len(train.classes),
    )


def validate(model, loader, accelerator):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, target in loader:
            pred = model(images).argmax(1)
            pred, target = accelerator.gather_for_metrics((pred, target))
            correct += (pred == target).sum().item()
            total += target.numel()
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/flowers")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", default="resnet50.pt")
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="fp16")
    train_loader, val_loader, num_classes = build_loaders(args.data, args.batch_size)
    model = models.resnet50(weights="IMAGENET1K_V2")
    model.fc = nn.Linear(model.fc.in_features, num_classes)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    scaler = GradScaler(enabled=True)

    for epoch in range(args.epochs):
        model.train()
        for step, (images, target) in enumerate(train_loader):
            optimizer.zero_grad()
            with autocast(enabled=True):
                output = model(images)
                loss = criterion(output, target)
            accelerator.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            if step % 50 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        scheduler.step()
        acc = validate(model, val_loader, accelerator)
        accelerator.print(f"epoch {epoch} val acc {acc:.4f}")
        accelerator.save(
            {"model": accelerator.unwrap_model(model).state_dict(), "scaler": scaler.state_dict(), "epoch": epoch},
            args.checkpoint,
        )


if __name__ == "__main__":
    main()
