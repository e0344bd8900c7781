import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.models import resnet50


class MelFrontend(nn.Module):
    def __init__(self, n_mels=80, dim=512):
        super().__init__()
        self.conv1 = nn.Conv1d(n_mels, dim, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        return self.norm(x.transpose(1, 2))


class AudioVisualNet(nn.Module):
    def __init__(self, num_classes, dim=512):
        super().__init__()
        self.frontend = MelFrontend(dim=dim)
        visual = resnet50(weights="IMAGENET1K_V2")
        visual.fc = nn.Linear(visual.fc.in_features, dim)
        self.visual = visual
        layer = nn.TransformerEncoderLayer(dim, 8, dim * 4, batch_first=True, norm_first=True)
        self.fusion = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, mel, image):
        with torch.cuda.amp.autocast(enabled=False):
            audio = self.frontend(mel.float())
        vis = self.visual(image.to(self.head.weight.dtype)).unsqueeze(1)
        h = self.fusion(torch.cat([vis, audio.to(vis.dtype)], dim=1))
        return self.head(h[:, 0])
