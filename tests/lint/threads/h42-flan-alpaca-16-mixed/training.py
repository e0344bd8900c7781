import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import Adafactor, AutoModelForSeq2SeqLM, AutoTokenizer

from data_loading import TextToTextDataset


class LightningModel(L.LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.save_hyperparameters(hparams)
        self.model = AutoModelForSeq2SeqLM.from_pretrained(self.hparams.model_name_or_path)
        self.tokenizer = AutoTokenizer.from_pretrained(self.hparams.model_name_or_path)
        if self.hparams.use_gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        if self.hparams.use_compile:
            self.model = torch.compile(self.model)

    def forward(self, input_ids, attention_mask, labels):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def _step(self, batch):
        labels = batch["target_ids"].clone()
        labels[labels == self.tokenizer.pad_token_id] = -100
        return self(batch["source_ids"], batch["source_mask"], labels).loss

    def training_step(self, batch, _):
        loss = self._step(batch)
        self.log("loss", loss, on_step=True, prog_bar=True, rank_zero_only=True)
        return loss

    def configure_optimizers(self):
        no_decay = ["bias", "LayerNorm.weight"]
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if not any(d in n for d in no_decay)],
             "weight_decay": self.hparams.weight_decay},
            {"params": [p for n, p in self.model.named_parameters() if any(d in n for d in no_decay)],
             "weight_decay": 0.0},
        ]
        return Adafactor(groups, lr=self.hparams.learning_rate, relative_step=False)

    def train_dataloader(self):
        data = TextToTextDataset(
            self.hparams.data_path, self.tokenizer, self.hparams.max_source_length, self.hparams.max_target_length
        )
        return DataLoader(data, batch_size=self.hparams.train_batch_size, shuffle=True, num_workers=4, drop_last=True)

    def on_save_checkpoint(self, checkpoint):
        folder = Path(self.hparams.output_dir) / f"epoch={self.current_epoch}"
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--output_dir", required=True)
    p.add_argument("--model_name_or_path", default="google/flan-t5-xl")
    p.add_argument("--data_path", default="data/train.json")
    p.add_argument("--max_source_length", type=int, default=64)
    p.add_argument("--max_target_length", type=int, default=512)
    p.add_argument("--train_batch_size", type=int, default=8)
    p.add_argument("--gradient_accumulation_steps", type=int, default=64)
    p.add_argument("--learning_rate", type=float, default=5e-4)
    p.add_argument("--weight_decay", type=float, default=0.0)
    p.add_argument("--train_epochs", type=int, default=3)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--use_compile", action="store_true")
    p.add_argument("--use_gradient_checkpointing", action="store_true")
    args = p.parse_args()

    L.seed_everything(args.seed)
    trainer = L.Trainer(
        precision="16-mixed",
        accelerator="gpu",
        strategy="auto",
        accumulate_grad_batches=args.gradient_accumulation_steps,
        default_root_dir=args.output_dir,
        gradient_clip_val=None,
        max_epochs=args.train_epochs,
        callbacks=[ModelCheckpoint(save_top_k=0, save_last=True)],
    )
    trainer.fit(LightningModel(args))


if __name__ == "__main__":
    main()
