import deepspeed
import torch.distributed as dist
from transformers import get_scheduler


class DeepspeedStrategy:
    def __init__(self, cfg, micro_batch_size, train_batch_size, zero_stage=3, bf16=True):
        self.cfg = cfg
        self.bf16 = bf16
        self.zero_stage = zero_stage
        self.micro = micro_batch_size
        self.batch = train_batch_size

    def is_rank_0(self):
        return dist.get_rank() == 0

    def get_ds_train_config(self):
        return {
            "steps_per_print": 100,
            "zero_optimization": {
                "stage": self.zero_stage,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "stage3_param_persistence_threshold": "auto",
            },
            "bf16": {"enabled": self.bf16},
            "gradient_clipping": self.cfg.trainer.policy.max_norm,
            "train_micro_batch_size_per_gpu": self.micro,
            "train_batch_size": self.batch,
            "zero_allow_untested_optimizer": True,
        }

    def prepare(self, pair):
        model, optim, steps = pair
        scheduler = get_scheduler("constant_with_warmup", optim, num_warmup_steps=0, num_training_steps=steps)
        config = self.get_ds_train_config()
        if self.zero_stage == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 100000
        engine, optim, _, scheduler = deepspeed.initialize(
            model=model.model, optimizer=optim, lr_scheduler=scheduler, config=config, dist_init_required=True
        )
        model.model = engine
        return model, optim, scheduler

    def backward(self, loss, model, optimizer):
        model.model.backward(loss)

    def optimizer_step(self, optimizer, model, scheduler):
        model.model.step()

    def save_ckpt(self, model, path):
        model.model.save_checkpoint(path)
