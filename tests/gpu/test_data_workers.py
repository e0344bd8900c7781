"""Data loaders with worker processes, which are forked from a process that uses the GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from limits import seconds
from processes import launch, mp_yaml, transcript

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device, persistent = sys.argv[1], sys.argv[2] == "persistent"

class Noise(Dataset):
    transform = nn.Sequential(nn.Identity(), nn.Identity())  # torchvision's transforms are modules too

    def __len__(self):
        return 640

    def __getitem__(self, index):
        for _ in range(10):
            x = self.transform(torch.randn(64))
        return x, x[:8]

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
loader = DataLoader(Noise(), batch_size=32, num_workers=2, pin_memory=device == "cuda", persistent_workers=persistent,
                    multiprocessing_context="fork")
for epoch in range(3):
    for x, y in loader:
        with torch.autocast(device, torch.bfloat16):
            out = net(x.to(device))
        loss = (out.float() - y.to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for x, y in DataLoader(Noise(), batch_size=64, num_workers=2, multiprocessing_context="fork"):
            net(x.to(device))
print("finished")
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("workers", ["persistent", "new"])
def test_data_is_loaded_by_workers(device: str, workers: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    config = mp_yaml(tmp_path, use_cpu=str(device == "cpu").lower())
    arguments = ("--config", config, tmp_path / "train.py", device, workers)
    run = launch(*arguments, cwd=tmp_path, timeout=seconds(90), PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert run.returncode == 0 and "finished" in run.stdout, transcript(run)
    assert "in force at steps 1-" in run.stderr and "its own code failed" not in run.stderr, transcript(run)
