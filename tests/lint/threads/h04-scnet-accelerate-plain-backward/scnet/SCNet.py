import torch
from torch import nn


class SCNet(nn.Module):
    def __init__(self, sources, audio_channels=2, dims=32, nfft=4096, hop_size=1024, win_size=4096, normalized=True):
        super().__init__()
        self.sources = sources
        self.audio_channels = audio_channels
        self.hop = hop_size
        self.encoder = nn.Sequential(
            nn.Conv1d(audio_channels, dims, 16, stride=8, padding=4),
            nn.GELU(),
            nn.Conv1d(dims, dims * 2, 8, stride=4, padding=2),
            nn.GELU(),
        )
        self.rnn = nn.LSTM(dims * 2, dims, num_layers=2, batch_first=True, bidirectional=True)
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(dims * 2, dims, 8, stride=4, padding=2),
            nn.GELU(),
            nn.ConvTranspose1d(dims, len(sources) * audio_channels, 16, stride=8, padding=4),
        )

    def forward(self, mix):
        length = mix.shape[-1]
        x = self.encoder(mix)
        y, _ = self.rnn(x.transpose(1, 2))
        out = self.decoder(y.transpose(1, 2))
        out = nn.functional.pad(out, (0, max(0, length - out.shape[-1])))[..., :length]
        return out.view(mix.shape[0], len(self.sources), self.audio_channels, length)
