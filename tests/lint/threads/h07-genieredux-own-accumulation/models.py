import torch
from torch import nn


class VideoTokenizer(nn.Module):
    def __init__(self, dim=256, patch=8, depth=4, heads=8, codebook=1024, num_actions=15):
        super().__init__()
        self.patch = patch
        self.to_tokens = nn.Conv3d(3, dim, (1, patch, patch), (1, patch, patch))
        self.action = nn.Embedding(num_actions, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 4, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.codebook = nn.Embedding(codebook, dim)
        self.to_pixels = nn.ConvTranspose3d(dim, 3, (1, patch, patch), (1, patch, patch))

    def forward(self, video, actions):
        b, c, t, h, w = video.shape
        x = self.to_tokens(video)
        x = x + self.action(actions).permute(0, 2, 1)[..., None, None]
        shape = x.shape
        z = self.encoder(x.flatten(2).transpose(1, 2))
        dist = torch.cdist(z, self.codebook.weight[None].expand(b, -1, -1))
        q = self.codebook(dist.argmin(-1))
        commit = (z - q.detach()).pow(2).mean() + (q - z.detach()).pow(2).mean()
        q = z + (q - z).detach()
        recon = self.to_pixels(q.transpose(1, 2).reshape(shape))
        return nn.functional.mse_loss(recon, video) + 0.25 * commit
