from pathlib import Path
from typing import Literal, Optional

import yaml
from pydantic import BaseModel


class LoraCfg(BaseModel):
    r: int = 64
    alpha: int = 16
    dropout: float = 0.05
    target_modules: str | list[str] = "all-linear"


class TrainingCfg(BaseModel):
    epochs: int = 3
    lr: float = 2e-4
    batch_size: int = 4
    gradient_accumulation_steps: int = 4
    quantization: Literal["4bit", "8bit", "none"] = "none"
    lora: LoraCfg = LoraCfg()
    logging_steps: int = 10


class DataCfg(BaseModel):
    train: str
    max_length: int = 2048


class SoupConfig(BaseModel):
    base: str
    output: str = "./output"
    data: DataCfg
    training: TrainingCfg = TrainingCfg()


def load_config(path: str) -> SoupConfig:
    return SoupConfig(**yaml.safe_load(Path(path).read_text()))
