import os
from dataclasses import dataclass, field
from glob import glob
from typing import Optional

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    Trainer,
    set_seed,
)

MODEL_CLASSES = {
    "chatglm": (AutoModel, AutoTokenizer),
    "llama": (AutoModelForCausalLM, AutoTokenizer),
    "auto": (AutoModelForCausalLM, AutoTokenizer),
}


@dataclass
class ModelArguments:
    model_type: str = field(default="auto")
    model_name_or_path: Optional[str] = field(default=None)
    torch_dtype: Optional[str] = field(default="float16", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]})


@dataclass
class DataArguments:
    train_file_dir: Optional[str] = field(default=None)
    validation_file_dir: Optional[str] = field(default=None)
    max_train_samples: Optional[int] = field(default=None)
    max_eval_samples: Optional[int] = field(default=10)
    preprocessing_num_workers: Optional[int] = field(default=None)
    max_source_length: int = field(default=256)
    max_target_length: int = field(default=256)


@dataclass
class PeftArguments(Seq2SeqTrainingArguments):
    use_peft: bool = field(default=True)
    lora_rank: int = field(default=8)
    lora_alpha: float = field(default=32.0)
    lora_dropout: float = field(default=0.05)


def preprocess_factory(tokenizer, max_source, max_target):
    def preprocess(examples):
        out = {"input_ids": [], "labels": []}
        for ins, inp, ans in zip(examples["instruction"], examples["input"], examples["output"]):
            src = tokenizer.encode(f"Q: {ins}\n{inp}\nA: ", add_special_tokens=False)[:max_source]
            tgt = tokenizer.encode(ans, add_special_tokens=False)[: max_target - 1] + [tokenizer.eos_token_id]
            out["input_ids"].append(src + tgt)
            out["labels"].append([-100] * len(src) + tgt)
        return out

    return preprocess


def main():
    model_args, data_args, training_args = HfArgumentParser(
        (ModelArguments, DataArguments, PeftArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model_class, tokenizer_class = MODEL_CLASSES[model_args.model_type]
    tokenizer = tokenizer_class.from_pretrained(model_args.model_name_or_path, trust_remote_code=True)
    files = {
        "train": glob(os.path.join(data_args.train_file_dir, "*.jsonl")),
        "validation": glob(os.path.join(data_args.validation_file_dir, "*.jsonl")),
    }
    raw = load_dataset("json", data_files=files)
    fn = preprocess_factory(tokenizer, data_args.max_source_length, data_args.max_target_length)
    data = raw.map(fn, batched=True, num_proc=data_args.preprocessing_num_workers, remove_columns=raw["train"].column_names)
    train = data["train"].select(range(min(len(data["train"]), data_args.max_train_samples or 10**9)))
    evals = data["validation"].select(range(min(len(data["validation"]), data_args.max_eval_samples)))

    torch_dtype = (
        model_args.torch_dtype if model_args.torch_dtype in ["auto", None] else getattr(torch, model_args.torch_dtype)
    )
    model = model_class.from_pretrained(
        model_args.model_name_or_path, torch_dtype=torch_dtype, trust_remote_code=True
    )
    if training_args.use_peft:
        model = get_peft_model(model, LoraConfig(
            task_type=TaskType.CAUSAL_LM, target_modules=["query_key_value"], r=training_args.lora_rank,
            lora_alpha=training_args.lora_alpha, lora_dropout=training_args.lora_dropout,
        ))
    else:
        print("Full parameters training")

    trainer = Trainer(
        model=model, args=training_args, train_dataset=train, eval_dataset=evals, tokenizer=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
    )
    if training_args.do_train:
        trainer.train()
        trainer.save_model(training_args.output_dir)
        trainer.save_state()


if __name__ == "__main__":
    main()
