import lightning as L
import torch

from versatil.models.vlm_encoder import VLMEncoder


class OpenVLAPolicy(L.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters()
        self.cfg = cfg
        self.encoder = VLMEncoder(cfg.model.name, cfg.model.model_dtype, cfg.model.lora_rank, cfg.model.lora_alpha)

    def training_step(self, batch, batch_idx):
        out = self.encoder(**batch)
        pred = out.logits[:, -batch["labels"].shape[1]:-1].argmax(-1)
        gold = batch["labels"][:, 1:]
        mask = gold != -100
        self.log("train/loss", out.loss, prog_bar=True)
        self.log("train/action_acc", (pred == gold)[mask].float().mean())
        return out.loss

    def configure_optimizers(self):
        params = [p for p in self.encoder.parameters() if p.requires_grad]
        opt = torch.optim.AdamW(params, lr=self.cfg.optim.lr, weight_decay=self.cfg.optim.weight_decay, betas=(0.9, 0.95))
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / self.cfg.optim.warmup))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}
