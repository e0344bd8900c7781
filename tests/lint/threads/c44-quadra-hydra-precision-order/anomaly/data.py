import os

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


class MVTecDataModule(pl.LightningDataModule):
    def __init__(self, root, category, size, batch_size, num_workers):
        super().__init__()
        self.dir = os.path.join(root, category)
        self.bs, self.nw = batch_size, num_workers
        self.tf = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor(),
                                      transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])

    def train_dataloader(self):
        return DataLoader(ImageFolder(f"{self.dir}/train", self.tf), self.bs, num_workers=self.nw)

    def test_dataloader(self):
        ds = ImageFolder(f"{self.dir}/test", self.tf)
        good = ds.class_to_idx["good"]
        ds.target_transform = lambda t: int(t != good)
        return DataLoader(ds, self.bs, num_workers=self.nw)
