import glob
import os

import numpy as np
import torch
from torch.utils.data import Dataset


class CachedClips(Dataset):
    def __init__(self, root):
        self.files = sorted(glob.glob(os.path.join(root, "*", "*.npz")))
        self.classes = {c: i for i, c in enumerate(sorted(os.listdir(root)))}

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = np.load(self.files[i])
        return torch.from_numpy(d["moments"]).float(), self.classes[os.path.basename(os.path.dirname(self.files[i]))]


def add_weight_decay(model, wd):
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": wd}]


class NativeScalerWithGradNormCount:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if update_grad:
            self._scaler.unscale_(optimizer)
            if clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, sd):
        self._scaler.load_state_dict(sd)
