import glob
import os

import numpy as np
import torch
import torchaudio
from torch.utils.data import Dataset


class FeatureAudio(Dataset):
    def __init__(self, cfg, segment):
        self.wavs = sorted(glob.glob(os.path.join(cfg["wav_dir"], "*.wav")))
        self.cfg, self.seg = cfg, segment // cfg["hop_length"]

    def __len__(self):
        return len(self.wavs)

    def __getitem__(self, i):
        wav, _ = torchaudio.load(self.wavs[i])
        stem = os.path.splitext(os.path.basename(self.wavs[i]))[0]
        phone = torch.from_numpy(np.load(os.path.join(self.cfg["feature_dir"], stem + ".npy"))).float()
        hop = self.cfg["hop_length"]
        n = min(phone.shape[0], wav.shape[1] // hop)
        s = np.random.randint(0, max(1, n - self.seg))
        return phone[s:s + self.seg].T, wav[:, s * hop:(s + self.seg) * hop]
