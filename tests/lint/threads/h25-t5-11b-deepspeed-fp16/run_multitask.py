import os
import sys
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    model_name_or_path: str = field()


@dataclass
class DataTrainingArguments:
    train_file: Optional[str] = field(default=None)
    validation_file: Optional[str] = field(default=None)
    max_source_length: int = field(default=512)
    max_target_length: int = field(default=128)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = load_dataset("json", data_files={"train": data_args.train_file, "validation": data_args.validation_file})

    config = AutoConfig.from_pretrained(model_args.model_name_or_path, use_cache=False)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path, config=config)

    def preprocess(examples):
        inputs = [f"{t}: {s}" for t, s in zip(examples["task"], examples["source"])]
        enc = tokenizer(inputs, max_length=data_args.max_source_length, truncation=True)
        enc["labels"] = tokenizer(
            text_target=examples["target"], max_length=data_args.max_target_length, truncation=True
        )["input_ids"]
        return enc

    data = raw.map(preprocess, batched=True, remove_columns=raw["train"].column_names)

    def metrics(eval_preds):
        preds, labels = eval_preds
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
        p = [x.strip() for x in tokenizer.batch_decode(preds, skip_special_tokens=True)]
        r = [x.strip() for x in tokenizer.batch_decode(labels, skip_special_tokens=True)]
        return {"exact": float(np.mean([a == b for a, b in zip(p, r)]))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=data["train"] if training_args.do_train else None,
        eval_dataset=data["validation"] if training_args.do_eval else None,
        tokenizer=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        compute_metrics=metrics,
    )
    if training_args.do_train:
        last = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model()
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate())
    return 0


if __name__ == "__main__":
    sys.exit(main())
