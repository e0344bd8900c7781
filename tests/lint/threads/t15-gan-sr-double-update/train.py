import argparse
import glob
import os

import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import functional as TF
from torchvision.transforms import RandomCrop

from image_model import ImageModel


class OTFDataset(Dataset):
    def __init__(self, root, patch, scale):
        self.files = sorted(glob.glob(os.path.join(root, "*.png")))
        self.patch, self.scale = patch, scale

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = Image.open(self.files[i]).convert("RGB")
        size = self.patch * self.scale
        gt = TF.crop(img, *RandomCrop.get_params(img, (size, size)))
        lq = gt.resize((self.patch, self.patch), Image.BICUBIC)
        return {"gt": TF.to_tensor(gt), "lq": TF.to_tensor(lq)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("-opt", required=True)
    with open(p.parse_args().opt) as f:
        opt = yaml.safe_load(f)
    torch.backends.cudnn.benchmark = True
    ds = opt["datasets"]
    loader = DataLoader(OTFDataset(ds["dataroot_gt"], ds["patch_size"], opt["scale"]), batch_size=ds["batch_size"],
                        shuffle=True, num_workers=ds["num_worker"], drop_last=True, pin_memory=True)
    model, it = ImageModel(opt), 0
    while it < opt["train"]["total_iter"]:
        for data in loader:
            it += 1
            model.feed_data(data)
            logs = model.optimize_parameters(it)
            if it % opt["logger"]["print_freq"] == 0:
                print(it, logs)
            if it % opt["logger"]["save_checkpoint_freq"] == 0:
                model.save(it)
            if it >= opt["train"]["total_iter"]:
                break


if __name__ == "__main__":
    main()
