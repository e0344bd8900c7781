import pytorch_lightning as pl
import torch
import torch.nn as nn

from sub_modules import GatedResidual, InterpretableMultiHeadAttention


class QuantileLoss(nn.Module):
    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        super().__init__()
        self.quantiles = quantiles

    def forward(self, pred, y):
        err = y.unsqueeze(-1) - pred
        return torch.stack([torch.max((q - 1) * err[..., i], q * err[..., i]) for i, q in enumerate(self.quantiles)]).mean()


class TemporalFusionTransformer(pl.LightningModule):
    def __init__(self, features, enc_len=120, dec_len=24, dim=64, heads=4, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.inp = nn.Linear(features, dim)
        self.dec_inp = nn.Linear(features - 1, dim)
        self.encoder = nn.LSTM(dim, dim, batch_first=True)
        self.decoder = nn.LSTM(dim, dim, batch_first=True)
        self.grn = GatedResidual(dim)
        self.attn = InterpretableMultiHeadAttention(heads, dim, 0.1)
        self.post = GatedResidual(dim)
        self.loss = QuantileLoss()
        self.out = nn.Linear(dim, len(self.loss.quantiles))

    def get_attention_mask(self, lengths, dec_len):
        enc = torch.arange(self.hparams.enc_len, device=self.device)[None] < (self.hparams.enc_len - lengths)[:, None]
        enc = enc.unsqueeze(1).expand(-1, dec_len, -1)
        step = torch.arange(dec_len, device=self.device)
        dec = (step[:, None] < step[None]).unsqueeze(0).expand(lengths.size(0), -1, -1)
        return torch.cat([enc, dec], -1)

    def forward(self, x):
        enc, state = self.encoder(self.inp(x["encoder"]))
        dec, _ = self.decoder(self.dec_inp(x["decoder"]), state)
        seq = self.grn(torch.cat([enc, dec], 1))
        n = dec.size(1)
        att, _ = self.attn(seq[:, -n:], seq, seq, self.get_attention_mask(x["lengths"], n))
        return self.out(self.post(att + seq[:, -n:]))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
