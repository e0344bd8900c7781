import argparse
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, random_split
from tqdm import tqdm

from unet import UNet
from utils.data_loading import CarvanaDataset
from utils.dice_score import dice_loss, multiclass_dice

dir_img = Path("./data/imgs/")
dir_mask = Path("./data/masks/")
dir_checkpoint = Path("./checkpoints/")


@torch.inference_mode()
def evaluate(net, dataloader, device, amp):
    net.eval()
    score = 0
    with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
        for batch in tqdm(dataloader, desc="Validation round", unit="batch", leave=False):
            image = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            mask_true = F.one_hot(batch["mask"].to(device), net.n_classes).permute(0, 3, 1, 2).float()
            mask_pred = F.one_hot(net(image).argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).float()
            score += multiclass_dice(mask_pred[:, 1:], mask_true[:, 1:])
    net.train()
    return score / max(len(dataloader), 1)


def train_model(model, device, epochs=5, batch_size=1, learning_rate=1e-5, val_percent=0.1, save_checkpoint=True,
                img_scale=0.5, amp=False, weight_decay=1e-8, momentum=0.999, gradient_clipping=1.0):
    dataset = CarvanaDataset(dir_img, dir_mask, img_scale)
    n_val = int(len(dataset) * val_percent)
    n_train = len(dataset) - n_val
    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(0))
    loader_args = dict(batch_size=batch_size, num_workers=4, pin_memory=True)
    train_loader = DataLoader(train_set, shuffle=True, **loader_args)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, **loader_args)

    optimizer = optim.RMSprop(model.parameters(), lr=learning_rate, weight_decay=weight_decay, momentum=momentum)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
    criterion = nn.CrossEntropyLoss()
    global_step = 0

    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        with tqdm(total=n_train, desc=f"Epoch {epoch}/{epochs}", unit="img") as pbar:
            for batch in train_loader:
                images = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
                true_masks = batch["mask"].to(device=device, dtype=torch.long)

                with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
                    masks_pred = model(images)
                    loss = criterion(masks_pred, true_masks)
                    loss += dice_loss(F.softmax(masks_pred, dim=1).float(),
                                      F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float())

                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
                grad_scaler.step(optimizer)
                grad_scaler.update()

                pbar.update(images.shape[0])
                global_step += 1
                epoch_loss += loss.item()
                pbar.set_postfix(**{"loss (batch)": loss.item()})

                division_step = n_train // (5 * batch_size)
                if division_step > 0 and global_step % division_step == 0:
                    val_score = evaluate(model, val_loader, device, amp)
                    scheduler.step(val_score)
                    logging.info(f"Validation Dice score: {val_score}")

        if save_checkpoint:
            dir_checkpoint.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), str(dir_checkpoint / f"checkpoint_epoch{epoch}.pth"))
            logging.info(f"Checkpoint {epoch} saved!")


def get_args():
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=5)
    parser.add_argument("--batch-size", "-b", dest="batch_size", type=int, default=1)
    parser.add_argument("--learning-rate", "-l", dest="lr", type=float, default=1e-5)
    parser.add_argument("--scale", "-s", type=float, default=0.5)
    parser.add_argument("--validation", "-v", dest="val", type=float, default=10.0)
    parser.add_argument("--amp", action="store_true", default=False)
    parser.add_argument("--classes", "-c", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    args = get_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(n_channels=3, n_classes=args.classes).to(memory_format=torch.channels_last)
    model.to(device=device)
    train_model(model=model, epochs=args.epochs, batch_size=args.batch_size, learning_rate=args.lr, device=device,
                img_scale=args.scale, val_percent=args.val / 100, amp=args.amp)
