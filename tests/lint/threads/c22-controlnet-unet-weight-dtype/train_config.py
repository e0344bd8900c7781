from dataclasses import dataclass
from typing import Optional


@dataclass
class TrainConfig:
    pretrained_model_name_or_path: str = "runwayml/stable-diffusion-v1-5"
    train_data_dir: str = "data/lineart"
    output_dir: str = "outputs"
    mixed_precision: Optional[str] = "fp16"
    gradient_accumulation_steps: int = 4
    train_batch_size: int = 2
    resolution: int = 512
    learning_rate: float = 1e-5
    lr_scheduler: str = "constant"
    lr_warmup_steps: int = 500
    max_train_steps: int = 15000
    max_grad_norm: float = 1.0
    checkpointing_steps: int = 500
    use_8bit_adam: bool = False
    seed: Optional[int] = 42
    log_with: str = "tensorboard"
    gradient_checkpointing: bool = True
