import glob
import os
import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class FrameFolders(Dataset):
    def __init__(self, video_folder, sample_size=256, sample_n_frames=8):
        self.clips = sorted(d for d in glob.glob(os.path.join(video_folder, "*")) if os.path.isdir(d))
        self.size, self.n = sample_size, sample_n_frames

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        frames = sorted(glob.glob(os.path.join(self.clips[i], "*.jpg")))
        start = random.randint(0, max(0, len(frames) - self.n))
        out = []
        for f in frames[start:start + self.n]:
            img = Image.open(f).convert("RGB").resize((self.size, self.size))
            out.append(torch.from_numpy(np.asarray(img).copy()).permute(2, 0, 1) / 127.5 - 1)
        return torch.stack(out)
