import argparse
import json

import pytorch_lightning as pl
import torch

from stable_audio_tools.data.dataset import create_dataloader_from_config
from stable_audio_tools.models.factory import create_model_from_config
from stable_audio_tools.training.diffusion import DiffusionUncondTrainingWrapper


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="sat")
    ap.add_argument("--model-config", required=True)
    ap.add_argument("--dataset-config", required=True)
    ap.add_argument("--save-dir", default="runs")
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--num-gpus", type=int, default=1)
    ap.add_argument("--num-nodes", type=int, default=1)
    ap.add_argument("--strategy", default="")
    ap.add_argument("--precision", default="16-mixed")
    ap.add_argument("--num-workers", type=int, default=6)
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--accum-batches", type=int, default=1)
    ap.add_argument("--checkpoint-every", type=int, default=10000)
    ap.add_argument("--gradient-clip-val", type=float, default=0.0)
    return ap.parse_args()


def main():
    args = get_args()
    pl.seed_everything(args.seed, workers=True)
    model_config = json.load(open(args.model_config))
    dataset_config = json.load(open(args.dataset_config))
    train_dl = create_dataloader_from_config(dataset_config, batch_size=args.batch_size,
                                             num_workers=args.num_workers, sample_size=model_config["sample_size"])
    model = create_model_from_config(model_config)
    training_wrapper = DiffusionUncondTrainingWrapper(model, lr=model_config["training"]["learning_rate"])

    if args.strategy:
        if args.strategy == "deepspeed":
            from pytorch_lightning.strategies import DeepSpeedStrategy
            strategy = DeepSpeedStrategy(
                contiguous_gradients=True,
                overlap_comm=True,
                reduce_scatter=True,
                reduce_bucket_size=5e8,
                allgather_bucket_size=5e8,
                load_full_weights=True,
            )
        else:
            strategy = args.strategy
    else:
        strategy = "ddp_find_unused_parameters_true" if args.num_gpus > 1 else "auto"

    trainer = pl.Trainer(
        devices=args.num_gpus,
        accelerator="gpu",
        num_nodes=args.num_nodes,
        strategy=strategy,
        precision=args.precision,
        accumulate_grad_batches=args.accum_batches,
        callbacks=[pl.callbacks.ModelCheckpoint(every_n_train_steps=args.checkpoint_every, save_top_k=-1)],
        log_every_n_steps=1,
        max_epochs=10000000,
        default_root_dir=args.save_dir,
        gradient_clip_val=args.gradient_clip_val,
        reload_dataloaders_every_n_epochs=0,
    )
    trainer.fit(training_wrapper, train_dl)


if __name__ == "__main__":
    main()
