import json
import os

import torch
from torch.utils.data import Dataset


class LatentDataset(Dataset):
    def __init__(self, json_path, num_latent_t):
        self.root = os.path.dirname(json_path)
        with open(json_path) as f:
            self.items = json.load(f)
        self.num_latent_t = num_latent_t

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        it = self.items[i]
        latent = torch.load(os.path.join(self.root, "latent", it["latent_path"]), map_location="cpu")
        embed = torch.load(os.path.join(self.root, "prompt_embed", it["prompt_embed_path"]), map_location="cpu")
        mask = torch.load(os.path.join(self.root, "prompt_mask", it["prompt_attention_mask"]), map_location="cpu")
        return latent[:, : self.num_latent_t].float(), embed.float(), mask.long()


def latent_collate(batch):
    latents, embeds, masks = zip(*batch)
    return torch.stack(latents), torch.stack(embeds), torch.stack(masks)
