import tinycudann as tcnn
import torch
from torch import nn

ENC = {"otype": "HashGrid", "n_levels": 16, "n_features_per_level": 2, "log2_hashmap_size": 19,
       "base_resolution": 16, "per_level_scale": 1.4472692012786865}
NET = {"otype": "FullyFusedMLP", "activation": "ReLU", "output_activation": "None", "n_neurons": 64, "n_hidden_layers": 1}


class DensityField(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = tcnn.NetworkWithInputEncoding(3, 1, {**ENC, "n_levels": 5, "log2_hashmap_size": 17}, NET)

    def forward(self, x):
        s = self.mlp(((x + 1.5) / 3.0).view(-1, 3)).view(x.shape[:-1]).to(x)
        return torch.exp((s - 1).clamp(max=15))


class RadianceField(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = tcnn.NetworkWithInputEncoding(3, 16, ENC, NET)
        self.dir_enc = tcnn.Encoding(3, {"otype": "SphericalHarmonics", "degree": 4})
        self.head = tcnn.Network(self.dir_enc.n_output_dims + 15, 3, {**NET, "output_activation": "Sigmoid", "n_hidden_layers": 2})

    def forward(self, x, d):
        h = self.base(((x + 1.5) / 3.0).view(-1, 3)).to(x)
        sigma = torch.exp((h[:, 0] - 1).clamp(max=15))
        rgb = self.head(torch.cat([self.dir_enc((d.reshape(-1, 3) + 1) / 2), h[:, 1:]], dim=-1)).to(x)
        return rgb.view(*x.shape[:-1], 3), sigma.view(x.shape[:-1])
