from pathlib import Path

import torch
import torchaudio
from torch.utils.data import Dataset


class WavSet(Dataset):
    def __init__(self, root, sources, samplerate, segment):
        self.tracks = sorted(p for p in Path(root).iterdir() if p.is_dir())
        self.sources = sources
        self.length = int(samplerate * segment)

    def __len__(self):
        return len(self.tracks)

    def __getitem__(self, idx):
        stems = []
        for s in self.sources:
            wav, _ = torchaudio.load(str(self.tracks[idx] / f"{s}.wav"), num_frames=self.length)
            stems.append(torch.nn.functional.pad(wav, (0, self.length - wav.shape[-1])))
        return torch.stack(stems)


def get_wav_datasets(cfg):
    train = WavSet(Path(cfg.wav) / "train", cfg.sources, cfg.samplerate, cfg.segment)
    valid = WavSet(Path(cfg.wav) / "valid", cfg.sources, cfg.samplerate, cfg.segment)
    return train, valid
