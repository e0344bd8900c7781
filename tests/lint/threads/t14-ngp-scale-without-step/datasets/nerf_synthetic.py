import json
import os

import imageio.v2 as imageio
import numpy as np
import torch


class SubjectLoader(torch.utils.data.Dataset):
    def __init__(self, subject_id, root_fp, split, num_rays=None, device="cpu"):
        base = os.path.join(root_fp, subject_id)
        with open(os.path.join(base, f"transforms_{split}.json")) as f:
            meta = json.load(f)
        images = [imageio.imread(os.path.join(base, fr["file_path"] + ".png")) for fr in meta["frames"]]
        self.images = torch.from_numpy(np.stack(images)).to(device)
        self.c2w = torch.tensor([fr["transform_matrix"] for fr in meta["frames"]], dtype=torch.float32, device=device)
        self.h, self.w = self.images.shape[1:3]
        self.focal = 0.5 * self.w / np.tan(0.5 * meta["camera_angle_x"])
        self.num_rays, self.device = num_rays, device

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        if self.num_rays:
            x = torch.randint(0, self.w, (self.num_rays,), device=self.device)
            y = torch.randint(0, self.h, (self.num_rays,), device=self.device)
        else:
            y, x = torch.meshgrid(torch.arange(self.h, device=self.device), torch.arange(self.w, device=self.device), indexing="ij")
        rgba = self.images[i, y, x].float() / 255.0
        cam = torch.stack([(x - self.w / 2 + 0.5) / self.focal, -(y - self.h / 2 + 0.5) / self.focal, -torch.ones_like(x, dtype=torch.float32)], -1)
        d = (cam[..., None, :] * self.c2w[i, :3, :3]).sum(-1)
        d = d / d.norm(dim=-1, keepdim=True)
        o = self.c2w[i, :3, 3].expand_as(d)
        bkgd = torch.rand(3, device=self.device) if self.num_rays else torch.ones(3, device=self.device)
        return {"pixels": rgba[..., :3] * rgba[..., 3:] + bkgd * (1 - rgba[..., 3:]), "rays": (o, d), "color_bkgd": bkgd}
