import copy
import logging
import os
from dataclasses import dataclass, field
from typing import Dict, Optional, Sequence

import torch
import transformers
from datasets import load_dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, Seq2SeqTrainer, set_seed

logger = logging.getLogger(__name__)
IGNORE_INDEX = -100


@dataclass
class ModelArguments:
    model_name_or_path: Optional[str] = field(default="PY007/TinyLlama-1.1B-intermediate-step-240k-503b")
    trust_remote_code: Optional[bool] = field(default=False)


@dataclass
class DataArguments:
    dataset: str = field(default="alpaca-clean")
    source_max_len: int = field(default=1024)
    target_max_len: int = field(default=256)
    eval_dataset_size: int = field(default=1024)


@dataclass
class TrainingArguments(transformers.Seq2SeqTrainingArguments):
    train_on_source: Optional[bool] = field(default=False)
    optim: str = field(default="adamw_torch")
    remove_unused_columns: bool = field(default=False)
    report_to: str = field(default="none")


def get_accelerate_model(args):
    device_map = "auto"
    if os.environ.get("LOCAL_RANK") is not None:
        device_map = {"": int(os.environ.get("LOCAL_RANK", "0"))}
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        device_map=device_map,
        trust_remote_code=args.trust_remote_code,
    )
    model = model.half()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, padding_side="right", use_fast=False)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


@dataclass
class DataCollatorForCausalLM:
    tokenizer: transformers.PreTrainedTokenizer
    source_max_len: int
    target_max_len: int
    train_on_source: bool

    def __call__(self, instances: Sequence[Dict]) -> Dict[str, torch.Tensor]:
        sources = [f"{self.tokenizer.bos_token}{ex['input']}" for ex in instances]
        targets = [f"{ex['output']}{self.tokenizer.eos_token}" for ex in instances]
        src = self.tokenizer(sources, max_length=self.source_max_len, truncation=True, add_special_tokens=False)
        tgt = self.tokenizer(targets, max_length=self.target_max_len, truncation=True, add_special_tokens=False)
        input_ids, labels = [], []
        for s, t in zip(src["input_ids"], tgt["input_ids"]):
            input_ids.append(torch.tensor(s + t))
            labels.append(torch.tensor(copy.deepcopy(s + t) if self.train_on_source else [IGNORE_INDEX] * len(s) + t))
        input_ids = pad_sequence(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        labels = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
        return {
            "input_ids": input_ids, "attention_mask": input_ids.ne(self.tokenizer.pad_token_id), "labels": labels,
        }


def format_alpaca(ex):
    prompt = f"### Instruction:\n{ex['instruction']}\n\n"
    if ex.get("input"):
        prompt += f"### Input:\n{ex['input']}\n\n"
    return {"input": prompt + "### Response: "}


def train():
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model, tokenizer = get_accelerate_model(model_args)
    model.config.use_cache = False
    dataset = load_dataset("yahma/alpaca-cleaned")["train"].map(format_alpaca, remove_columns=["instruction"])
    split = dataset.train_test_split(test_size=data_args.eval_dataset_size, shuffle=True, seed=42)
    trainer = Seq2SeqTrainer(
        model=model,
        tokenizer=tokenizer,
        args=training_args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=DataCollatorForCausalLM(
            tokenizer, data_args.source_max_len, data_args.target_max_len, training_args.train_on_source
        ),
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("eval", trainer.evaluate(metric_key_prefix="eval"))


if __name__ == "__main__":
    train()
