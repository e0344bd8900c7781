import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchvision
from sklearn.metrics import roc_auc_score
from torchvision.models.feature_extraction import create_feature_extractor


class Padim(pl.LightningModule):
    def __init__(self, backbone="resnet18", n_features=100):
        super().__init__()
        self.automatic_optimization = False
        net = torchvision.models.get_model(backbone, weights="DEFAULT")
        self.fe = create_feature_extractor(net, ["layer1", "layer2", "layer3"]).eval()
        self.register_buffer("idx", torch.randperm(448)[:n_features])
        self.register_buffer("mean", torch.empty(0))
        self.register_buffer("inv_cov", torch.empty(0))
        self.bank, self.scores = [], []

    def embed(self, x):
        with torch.no_grad():
            fs = list(self.fe(x).values())
        size = fs[0].shape[-2:]
        return torch.cat([F.interpolate(f, size) for f in fs], 1)[:, self.idx]

    def training_step(self, batch, _):
        self.bank.append(self.embed(batch[0]).flatten(2).cpu())

    def on_train_epoch_end(self):
        e = torch.cat(self.bank).float()
        self.bank.clear()
        self.mean = e.mean(0).to(self.device)
        d = (e - e.mean(0)).permute(2, 0, 1)
        cov = d.transpose(1, 2) @ d / (len(e) - 1) + 0.01 * torch.eye(d.shape[-1])
        self.inv_cov = torch.linalg.inv(cov).to(self.device)

    def test_step(self, batch, _):
        d = (self.embed(batch[0]).flatten(2).float() - self.mean).permute(0, 2, 1)
        m = torch.einsum("bpi,pij,bpj->bp", d, self.inv_cov, d).clamp(min=0).sqrt().amax(1)
        self.scores += list(zip(m.tolist(), batch[1].tolist()))

    def on_test_epoch_end(self):
        s, y = zip(*self.scores)
        self.log("image_auroc", roc_auc_score(y, s))

    def configure_optimizers(self):
        return None
