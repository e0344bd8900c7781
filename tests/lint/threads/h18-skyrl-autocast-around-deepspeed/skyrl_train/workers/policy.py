import torch
from tqdm import tqdm

from skyrl_train.models import HFModelWrapper
from skyrl_train.utils.ppo import masked_mean, policy_loss


class DeepSpeedPolicyWorker:
    def __init__(self, cfg, strategy):
        self.cfg = cfg
        self.strategy = strategy

    def init_model(self, model_path, num_training_steps):
        wrapped = HFModelWrapper(
            model_path,
            use_flash_attention_2=self.cfg.trainer.flash_attn,
            bf16=self.cfg.trainer.bf16,
            target_modules=None,
        )
        if self.cfg.trainer.gradient_checkpointing:
            wrapped.gradient_checkpointing_enable()
        optim = torch.optim.AdamW(wrapped.model.parameters(), lr=self.cfg.trainer.policy.lr, betas=(0.9, 0.95))
        self.model, self.optimizer, self.scheduler = self.strategy.prepare((wrapped, optim, num_training_steps))

    def training_step(self, exp):
        self.model.train()
        exp = {k: v.to(self.model.model.device) for k, v in exp.items()}
        with torch.autocast(dtype=torch.bfloat16, device_type="cuda"):
            log_probs = self.model(
                exp["sequences"], exp["num_actions"], attention_mask=exp["attention_mask"],
                temperature=self.cfg.generator.temperature,
            )
            loss = policy_loss(
                log_probs, exp["old_log_probs"], exp["advantages"], exp["response_mask"],
                clip_low=self.cfg.trainer.eps_clip_low, clip_high=self.cfg.trainer.eps_clip_high,
            )
            if self.cfg.trainer.use_kl_loss:
                kl = masked_mean((log_probs - exp["ref_log_probs"]).abs(), exp["response_mask"])
                loss = loss + self.cfg.trainer.kl_loss_coef * kl
        self.strategy.backward(loss, self.model, self.optimizer)
        self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler)
        return {"policy_loss": loss.item(), "lr": self.scheduler.get_last_lr()[0]}

    @torch.no_grad()
    def forward(self, batch):
        self.model.eval()
        with torch.autocast(dtype=torch.bfloat16, device_type="cuda"):
            return self.model(batch["sequences"], batch["num_actions"], attention_mask=batch["attention_mask"]).cpu()

    def ppo_train(self, dataloader):
        status = {}
        for _ in range(self.cfg.trainer.update_epochs_per_batch):
            for exp in tqdm(dataloader, desc="policy", disable=not self.strategy.is_rank_0()):
                status = self.training_step(exp)
        return status

    def save_ckpt(self, path):
        self.strategy.save_ckpt(self.model, path)
