import os
import pathlib
from dataclasses import dataclass, field
from typing import Optional

import transformers
from transformers import AutoModel, AutoTokenizer, Trainer

from GOT.data import make_data_module


@dataclass
class ModelArguments:
    model_name_or_path: Optional[str] = field(default="facebook/opt-125m")
    use_im_start_end: bool = field(default=False)
    freeze_vision_tower: bool = field(default=False)
    freeze_lm_model: bool = field(default=False)


@dataclass
class DataArguments:
    datasets: str = field(default=None)
    data_root: str = field(default="data")
    image_token_len: int = field(default=256)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    model_max_length: int = field(default=2048)
    optim: str = field(default="adamw_torch")
    remove_unused_columns: bool = field(default=False)


def safe_save_model_for_hf_trainer(trainer, output_dir):
    if trainer.deepspeed:
        trainer.save_model(output_dir)
        return
    state_dict = {k: v.cpu() for k, v in trainer.model.state_dict().items()}
    if trainer.args.should_save:
        trainer._save(output_dir, state_dict=state_dict)


def train():
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, trust_remote_code=True, padding_side="right",
        model_max_length=training_args.model_max_length,
    )
    model = AutoModel.from_pretrained(model_args.model_name_or_path, trust_remote_code=True, use_safetensors=True)
    for n, p in model.named_parameters():
        if model_args.freeze_vision_tower and "vision_tower" in n:
            p.requires_grad_(False)
        if model_args.freeze_lm_model and "vision_tower" not in n and "mm_projector" not in n:
            p.requires_grad_(False)

    data_module = make_data_module(tokenizer, data_args, training_args.model_max_length)
    trainer = Trainer(model=model, tokenizer=tokenizer, args=training_args, **data_module)
    if list(pathlib.Path(training_args.output_dir).glob("checkpoint-*")):
        trainer.train(resume_from_checkpoint=True)
    else:
        trainer.train()
    trainer.save_state()
    safe_save_model_for_hf_trainer(trainer, training_args.output_dir)


if __name__ == "__main__":
    train()
