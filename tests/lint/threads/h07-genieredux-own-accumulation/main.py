import hydra
import numpy as np
import torch
from pathlib import Path
from torch.utils.data import Dataset

from models import VideoTokenizer
from training.trainer import Trainer


class CoinRunClips(Dataset):
    def __init__(self, root, frames=8):
        self.files = sorted(Path(root).glob("*.npz"))
        self.frames = frames

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        z = np.load(self.files[i])
        start = np.random.randint(0, len(z["frames"]) - self.frames + 1)
        video = torch.from_numpy(z["frames"][start:start + self.frames]).permute(3, 0, 1, 2).float() / 255.0
        actions = torch.from_numpy(z["actions"][start:start + self.frames]).long()
        return video, actions


@hydra.main(version_base=None, config_path="configs", config_name="tokenizer")
def main(config):
    torch.manual_seed(config.seed)
    model = VideoTokenizer(**config.model)
    Trainer(model, config.train, CoinRunClips(config.data.train), CoinRunClips(config.data.valid)).train()


if __name__ == "__main__":
    main()
