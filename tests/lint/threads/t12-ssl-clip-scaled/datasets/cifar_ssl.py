import numpy as np
from torch.utils.data import Dataset, Subset
from torchvision import transforms as T
from torchvision.datasets import CIFAR10

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
weak = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(32, padding=4), T.ToTensor(), T.Normalize(MEAN, STD)])
strong = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(32, padding=4), T.RandAugment(), T.ToTensor(),
                    T.Normalize(MEAN, STD)])
plain = T.Compose([T.ToTensor(), T.Normalize(MEAN, STD)])


class Unlabeled(Dataset):
    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        img, _ = self.base[i]
        return weak(img), strong(img)


def build_ssl_cifar(root, num_labels, seed=0):
    labeled = CIFAR10(root, train=True, download=True, transform=weak)
    targets = np.array(labeled.targets)
    rng = np.random.RandomState(seed)
    idx = np.concatenate([rng.choice(np.where(targets == c)[0], num_labels // 10, replace=False) for c in range(10)])
    return Subset(labeled, idx.tolist()), Unlabeled(CIFAR10(root, train=True)), CIFAR10(root, train=False, transform=plain)
