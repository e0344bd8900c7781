import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from gan_module import VAEGAN


def main():
    L.seed_everything(0)
    tf = transforms.Compose([
        transforms.CenterCrop(148), transforms.Resize(64), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)
    ])
    train = datasets.CelebA("data", split="train", transform=tf, download=True)
    val = datasets.CelebA("data", split="valid", transform=tf, download=True)
    model = VAEGAN()
    with torch.no_grad():
        x = torch.zeros(2, 3, 64, 64)
        model.encoder(x)
        model.critic(x)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        max_epochs=40,
        callbacks=[ModelCheckpoint(monitor="val_rec", save_top_k=2)],
    )
    trainer.fit(
        model,
        DataLoader(train, batch_size=128, shuffle=True, num_workers=8, drop_last=True),
        DataLoader(val, batch_size=128, num_workers=8),
    )


if __name__ == "__main__":
    main()
