import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


class SimMIMTransform:
    def __init__(self, cfg, patch):
        self.tf = T.Compose([T.RandomResizedCrop(cfg["IMG_SIZE"], (0.67, 1.0)), T.RandomHorizontalFlip(), T.ToTensor(),
                             T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
        self.rand = cfg["IMG_SIZE"] // cfg["MASK_PATCH_SIZE"]
        self.rep = cfg["MASK_PATCH_SIZE"] // patch
        self.count = int(self.rand ** 2 * cfg["MASK_RATIO"])

    def __call__(self, img):
        mask = torch.zeros(self.rand ** 2)
        mask[torch.randperm(self.rand ** 2)[:self.count]] = 1
        mask = mask.view(self.rand, self.rand).repeat_interleave(self.rep, 0).repeat_interleave(self.rep, 1)
        return self.tf(img.convert("RGB")), mask


class Pairs(ImageFolder):
    def __getitem__(self, i):
        path, y = self.samples[i]
        img, mask = self.transform(self.loader(path))
        return img, mask, y


def build_loader(config):
    ds = Pairs(config["DATA"]["DATA_PATH"], SimMIMTransform(config["DATA"], config["MODEL"]["PATCH"]))
    sampler = DistributedSampler(ds, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True)
    return DataLoader(ds, config["DATA"]["BATCH_SIZE"], sampler=sampler, num_workers=config["DATA"]["NUM_WORKERS"],
                      pin_memory=True, drop_last=True)
