"""DeepSpeed with bf16: a submodule with autocast disabled gets an FP32 input, and has bf16 weights.

The thread has fp16, which DeepSpeed takes on few CPUs only.
"""

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class MelFrontend(nn.Module):
    def __init__(self, n_mels, dim):
        super().__init__()
        self.conv1 = nn.Conv1d(n_mels, dim, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        return self.norm(x.transpose(1, 2))


class AudioVisualNet(nn.Module):
    def __init__(self, num_classes=10, dim=32):
        super().__init__()
        self.frontend = MelFrontend(8, dim)
        self.visual = nn.Linear(48, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, dim * 4, dropout=0.0, batch_first=True, norm_first=True)
        self.fusion = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, mel, image):
        with torch.autocast("cpu", enabled=False):
            audio = self.frontend(mel.float())
        vis = self.visual(image.to(self.head.weight.dtype).flatten(1)).unsqueeze(1)
        h = self.fusion(torch.cat([vis, audio.to(vis.dtype)], dim=1))
        return self.head(h[:, 0])


torch.manual_seed(0)
model = AudioVisualNet()
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
for _ in range(4):
    mel, image = torch.randn(8, 8, 16, device=engine.device), torch.randn(8, 3, 4, 4, device=engine.device)
    label = torch.randint(0, 10, (8,), device=engine.device)
    loss = F.cross_entropy(engine(mel, image).float(), label)
    engine.backward(loss)
    engine.step()
print(f"loss {loss.item():.3f}")
