from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class CarvanaDataset(Dataset):
    def __init__(self, images_dir, mask_dir, scale=1.0, mask_suffix="_mask"):
        self.images_dir, self.mask_dir, self.scale, self.suffix = Path(images_dir), Path(mask_dir), scale, mask_suffix
        self.ids = sorted(p.stem for p in self.images_dir.glob("*.jpg"))

    def __len__(self):
        return len(self.ids)

    def _load(self, path, resample):
        img = Image.open(path)
        return img.resize((int(self.scale * img.width) // 8 * 8, int(self.scale * img.height) // 8 * 8), resample)

    def __getitem__(self, i):
        name = self.ids[i]
        img = np.asarray(self._load(self.images_dir / f"{name}.jpg", Image.BICUBIC)) / 255.0
        mask = np.asarray(self._load(self.mask_dir / f"{name}{self.suffix}.gif", Image.NEAREST))
        return {"image": torch.as_tensor(img.copy()).permute(2, 0, 1).float().contiguous(),
                "mask": torch.as_tensor((mask > 0).astype(np.int64)).long().contiguous()}
