import json
import os

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50

from ops import RoIAlign


class ProposalDataset(Dataset):
    def __init__(self, root, size=800):
        with open(os.path.join(root, "proposals.json")) as f:
            self.items = json.load(f)
        self.root, self.size = root, size

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        it = self.items[i]
        img = Image.open(os.path.join(self.root, it["file"])).convert("RGB").resize((self.size, self.size))
        x = torch.from_numpy(np.asarray(img).copy()).permute(2, 0, 1).float().div(255)
        return x, torch.tensor(it["boxes"], dtype=torch.float32), torch.tensor(it["labels"])


def collate(batch):
    imgs, boxes, labels = zip(*batch)
    rois = torch.cat([torch.cat([torch.full((len(b), 1), float(i)), b], dim=1) for i, b in enumerate(boxes)])
    return torch.stack(imgs), rois, torch.cat(labels)


class FastRCNN(nn.Module):
    def __init__(self, num_classes=81):
        super().__init__()
        net = resnet50(weights="IMAGENET1K_V2")
        self.backbone = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3)
        self.pool = RoIAlign(7, spatial_scale=1 / 16, sampling_ratio=1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(1024 * 49, 1024), nn.ReLU(), nn.Linear(1024, num_classes))

    def forward(self, x, rois):
        return self.head(self.pool(self.backbone(x), rois))


def main(root="data/coco", epochs=12):
    loader = DataLoader(ProposalDataset(root), batch_size=4, shuffle=True, num_workers=8, collate_fn=collate)
    model = FastRCNN().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 11])
    scaler = GradScaler()
    for epoch in range(epochs):
        model.train()
        for i, (imgs, rois, labels) in enumerate(loader):
            imgs, rois, labels = imgs.cuda(), rois.cuda(), labels.cuda()
            optimizer.zero_grad()
            with autocast():
                loss = F.cross_entropy(model(imgs, rois), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if i % 50 == 0:
                print(epoch, i, loss.item())
        scheduler.step()
        torch.save({"model": model.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch}, f"epoch_{epoch}.pth")


if __name__ == "__main__":
    main()
