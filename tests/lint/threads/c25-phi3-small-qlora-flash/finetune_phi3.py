import sys
import warnings

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

warnings.filterwarnings("ignore")
model_name = "microsoft/Phi-3-small-128k-instruct"

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def load_frame(path):
    df = pd.read_csv(path).dropna(subset=["question", "sql"])
    df["len"] = df["sql"].str.len()
    return df[df["len"] < np.percentile(df["len"], 99)]


def to_chat(row, tokenizer):
    msgs = [{"role": "user", "content": f"Schema:\n{row['schema']}\n\nQuestion: {row['question']}"},
            {"role": "assistant", "content": row["sql"]}]
    return tokenizer.apply_chat_template(msgs, tokenize=False)


def build_dataset(path, tokenizer, max_len=2048):
    df = load_frame(path)
    texts = [to_chat(r, tokenizer) for _, r in df.iterrows()]
    ds = Dataset.from_dict({"text": texts})
    return ds.map(lambda b: tokenizer(b["text"], truncation=True, max_length=max_len), batched=True,
                  remove_columns=["text"])


def main(path):
    tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=True)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        model_name,
        quantization_config=bnb_config,
        device_map="auto",
        trust_remote_code=True,
        attn_implementation="flash_attention_2",
    )
    model.gradient_checkpointing_enable()
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
        target_modules=["query_key_value", "dense", "up_proj", "down_proj"]))
    model.print_trainable_parameters()

    ds = build_dataset(path, tokenizer).train_test_split(test_size=0.05, seed=1)
    args = TrainingArguments(
        output_dir="phi3-small-sql",
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=8,
        num_train_epochs=2,
        learning_rate=2e-4,
        warmup_ratio=0.03,
        lr_scheduler_type="cosine",
        optim="paged_adamw_8bit",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=200,
        save_steps=200,
        report_to="none",
    )
    trainer = Trainer(model=model, args=args, train_dataset=ds["train"], eval_dataset=ds["test"],
                      data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    trainer.train()
    trainer.save_model("phi3-small-sql/final")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sql_pairs.csv")
