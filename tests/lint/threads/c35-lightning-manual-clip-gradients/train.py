import lightning.pytorch as pl
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import MNIST

from gan_module import GAN


class MNISTData(pl.LightningDataModule):
    def __init__(self, root="./data", batch_size=256):
        super().__init__()
        self.root, self.batch_size = root, batch_size
        self.tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])

    def prepare_data(self):
        MNIST(self.root, train=True, download=True)

    def train_dataloader(self):
        return DataLoader(MNIST(self.root, train=True, transform=self.tf), self.batch_size, shuffle=True,
                          num_workers=4)


if __name__ == "__main__":
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=20)
    trainer.fit(GAN(), MNISTData())
