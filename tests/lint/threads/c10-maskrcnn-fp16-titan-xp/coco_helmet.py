import torch
from torchvision.datasets import CocoDetection
from torchvision.transforms.functional import to_tensor


class HelmetDetection(CocoDetection):
    def __getitem__(self, i):
        img, anns = super().__getitem__(i)
        boxes = torch.tensor([a["bbox"] for a in anns], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return to_tensor(img), {"boxes": boxes, "labels": torch.tensor([a["category_id"] for a in anns])}


def collate(b):
    return tuple(zip(*b))
