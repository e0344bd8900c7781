import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


class Text2SemanticDecoder(nn.Module):
    def __init__(self, m):
        super().__init__()
        d = m["hidden_dim"]
        self.EOS = m["EOS"]
        self.text, self.audio = nn.Embedding(m["phoneme_vocab_size"], d), nn.Embedding(m["vocab_size"], d)
        self.pos = nn.Embedding(2048, d)
        layer = nn.TransformerEncoderLayer(d, m["head"], 4 * d, m["dropout"], batch_first=True)
        self.h = nn.TransformerEncoder(layer, m["n_layer"])
        self.out = nn.Linear(d, m["vocab_size"], bias=False)

    def forward(self, x, y):
        n = x.size(1)
        z = torch.cat([self.text(x), self.audio(y[:, :-1])], 1)
        z = z + self.pos(torch.arange(z.size(1), device=z.device))
        mask = torch.triu(torch.ones(z.size(1), z.size(1), dtype=torch.bool, device=z.device), 1)
        mask[:, :n] = False
        logits = self.out(self.h(z, mask=mask)[:, n:])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y[:, 1:].reshape(-1), ignore_index=self.EOS)
        acc = (logits.topk(3, -1).indices == y[:, 1:, None]).any(-1).float().mean()
        return loss, acc


class Text2SemanticLightningModule(pl.LightningModule):
    def __init__(self, config, output_dir):
        super().__init__()
        self.config = config
        self.model = Text2SemanticDecoder(config["model"])

    def training_step(self, batch, batch_idx):
        loss, acc = self.model(batch["phoneme_ids"], batch["semantic_ids"])
        self.log("total_loss", loss, prog_bar=True)
        self.log("top_3_acc", acc, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.config["optimizer"]["lr"], betas=(0.9, 0.95))
