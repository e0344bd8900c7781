from dataclasses import dataclass, field
from glob import glob
from itertools import chain
from typing import Optional

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Seq2SeqTrainingArguments, Trainer,
                          default_data_collator)


@dataclass
class ModelArguments:
    model_type: str = field(default="auto")
    model_name_or_path: Optional[str] = field(default=None)
    torch_dtype: Optional[str] = field(default="float16")
    device_map: Optional[str] = field(default="auto")


@dataclass
class DataArguments:
    train_file_dir: Optional[str] = field(default=None)
    validation_file_dir: Optional[str] = field(default=None)
    max_train_samples: Optional[int] = field(default=None)
    max_eval_samples: Optional[int] = field(default=None)
    block_size: int = field(default=1024)
    preprocessing_num_workers: Optional[int] = field(default=None)


@dataclass
class ScriptArguments:
    use_peft: bool = field(default=True)
    target_modules: Optional[str] = field(default="all")
    lora_rank: int = field(default=8)
    lora_dropout: float = field(default=0.05)
    lora_alpha: float = field(default=32.0)


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments, ScriptArguments))
    m, d, targs, s = parser.parse_args_into_dataclasses()
    tok = AutoTokenizer.from_pretrained(m.model_name_or_path, trust_remote_code=True, use_fast=False)
    files = {"train": glob(f"{d.train_file_dir}/*.txt"), "validation": glob(f"{d.validation_file_dir}/*.txt")}
    raw = load_dataset("text", data_files=files)

    def group(ex):
        ids = list(chain(*tok(ex["text"])["input_ids"]))
        n = len(ids) // d.block_size * d.block_size
        blocks = [ids[i: i + d.block_size] for i in range(0, n, d.block_size)]
        return {"input_ids": blocks, "labels": [b[:] for b in blocks]}

    lm = raw.map(group, batched=True, remove_columns=["text"], num_proc=d.preprocessing_num_workers)
    model = AutoModelForCausalLM.from_pretrained(m.model_name_or_path, torch_dtype=getattr(torch, m.torch_dtype),
                                                 trust_remote_code=True)
    if s.use_peft:
        targets = ["W_pack", "o_proj", "gate_proj", "up_proj", "down_proj"] if s.target_modules == "all" \
            else s.target_modules.split(",")
        model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=targets, r=s.lora_rank,
                                                 lora_alpha=s.lora_alpha, lora_dropout=s.lora_dropout))
    if targs.gradient_checkpointing:
        model.enable_input_require_grads()
        model.config.use_cache = False
    trainer = Trainer(model=model, args=targs, train_dataset=lm["train"], eval_dataset=lm["validation"],
                      tokenizer=tok, data_collator=default_data_collator)
    if targs.do_train:
        trainer.train()
        trainer.save_model(targs.output_dir)
    if targs.do_eval:
        print(trainer.evaluate())


if __name__ == "__main__":
    main()
