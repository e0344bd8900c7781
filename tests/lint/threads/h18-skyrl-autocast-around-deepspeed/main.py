import glob
import os

import deepspeed
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from skyrl_train.distributed.deepspeed_strategy import DeepspeedStrategy
from skyrl_train.workers.policy import DeepSpeedPolicyWorker


class Rollouts(Dataset):
    def __init__(self, root):
        self.files = sorted(glob.glob(os.path.join(root, "*.pt")))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.load(self.files[i], map_location="cpu")


def main():
    cfg = OmegaConf.load("config/ppo_base_config.yaml")
    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    strategy = DeepspeedStrategy(cfg, cfg.trainer.micro_train_batch_size_per_gpu, cfg.trainer.train_batch_size,
                                 cfg.trainer.zero_stage, cfg.trainer.bf16)
    worker = DeepSpeedPolicyWorker(cfg, strategy)
    worker.init_model(cfg.trainer.policy.model.path, cfg.trainer.total_steps)
    loader = DataLoader(Rollouts(cfg.data.rollouts), batch_size=None)
    for it in range(cfg.trainer.total_steps):
        status = worker.ppo_train(loader)
        if strategy.is_rank_0():
            print(it, status)
        if it % cfg.trainer.ckpt_interval == 0:
            worker.save_ckpt(cfg.trainer.ckpt_path)


if __name__ == "__main__":
    main()
