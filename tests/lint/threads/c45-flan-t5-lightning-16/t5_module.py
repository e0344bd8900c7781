import lightning.pytorch as pl
import torch
from transformers import T5ForConditionalGeneration, get_linear_schedule_with_warmup


class T5FineTuner(pl.LightningModule):
    def __init__(self, model_name="google/flan-t5-xl", lr=1e-4, warmup=200, total=20000):
        super().__init__()
        self.save_hyperparameters()
        self.model = T5ForConditionalGeneration.from_pretrained(model_name)
        self.model.gradient_checkpointing_enable()

    def forward(self, input_ids, attention_mask, labels=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def training_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        no_decay = ["bias", "layer_norm.weight"]
        named = list(self.model.named_parameters())
        groups = [{"params": [p for n, p in named if not any(k in n for k in no_decay)], "weight_decay": 0.01},
                  {"params": [p for n, p in named if any(k in n for k in no_decay)], "weight_decay": 0.0}]
        opt = torch.optim.AdamW(groups, lr=self.hparams.lr)
        sch = get_linear_schedule_with_warmup(opt, self.hparams.warmup, self.hparams.total)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sch, "interval": "step"}}
