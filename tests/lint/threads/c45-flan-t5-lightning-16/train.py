import argparse

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from data import SummaryData
from t5_module import T5FineTuner

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="google/flan-t5-xl")
    ap.add_argument("--train", default="data/train.parquet")
    ap.add_argument("--val", default="data/val.parquet")
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()

    trainer = pl.Trainer(
        precision="16",
        accelerator="gpu",
        strategy="auto",
        devices=4,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=8,
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", patience=2)],
    )
    trainer.fit(T5FineTuner(args.model), SummaryData(args.train, args.val, args.model))
