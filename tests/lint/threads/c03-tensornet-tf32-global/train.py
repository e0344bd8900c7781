import argparse

import lightning.pytorch as pl
import torch
import yaml
from torch_geometric.datasets import MD17
from torch_geometric.loader import DataLoader
from torch_geometric.nn import radius_graph

from models.tensornet import TensorNet


class LNNP(pl.LightningModule):
    def __init__(self, hp):
        super().__init__()
        self.save_hyperparameters(hp)
        self.model = TensorNet(hp["embedding_dimension"], hp["num_layers"], hp["num_rbf"], hp["cutoff_upper"])

    def step(self, batch, stage):
        with torch.enable_grad():
            batch.pos.requires_grad_(True)
            ei = radius_graph(batch.pos, r=self.hparams.cutoff_upper, batch=batch.batch)
            y = self.model(batch.z, batch.pos, ei, batch.batch)
            f = -torch.autograd.grad(y.sum(), batch.pos, create_graph=True)[0]
        le = torch.nn.functional.mse_loss(y, batch.energy)
        lf = torch.nn.functional.mse_loss(f, batch.force)
        self.log_dict({f"{stage}_e_mae": (y - batch.energy).abs().mean(),
                       f"{stage}_f_mae": (f - batch.force).abs().mean()}, batch_size=batch.num_graphs)
        return self.hparams.y_weight * le + self.hparams.neg_dy_weight * lf

    def training_step(self, batch, _):
        return self.step(batch, "train")

    def validation_step(self, batch, _):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--conf", default="examples/tensornet-md17.yaml")
    hp = yaml.safe_load(open(ap.parse_args().conf))
    ds = MD17(hp["dataset_root"], name=hp["molecule"]).shuffle()
    train, val = ds[:hp["train_size"]], ds[hp["train_size"]:hp["train_size"] + hp["val_size"]]
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision=hp["precision"],
                         max_epochs=hp["num_epochs"], inference_mode=False,
                         gradient_clip_val=hp["gradient_clipping"])
    trainer.fit(LNNP(hp), DataLoader(train, hp["batch_size"], shuffle=True), DataLoader(val, 64))


if __name__ == "__main__":
    main()
