import os

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, prepare_model_for_int8_training
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    LlamaTokenizer,
    Trainer,
    TrainingArguments,
)

BASE = "/home/han/new_store/Llama/7B"
TOKENIZER = "/home/han/new_store/Llama/merged_tokenizer_hf"
DATA = "data/zh_wiki.jsonl"
OUT = "out/llama_zh"
BLOCK = 512


def build_tokenizer():
    tok = LlamaTokenizer.from_pretrained(TOKENIZER, padding=True, truncation=True)
    n = tok.add_special_tokens({"pad_token": "[PAD]"})
    print(len(tok), n)
    return tok


def build_model(tok):
    model = LlamaForCausalLM.from_pretrained(BASE, torch_dtype=torch.float16, device_map="auto")
    model.resize_token_embeddings(len(tok))
    for name, param in model.named_parameters():
        if "model.embed_tokens" not in name and "lm_head" not in name:
            param.requires_grad = False
    model.config.use_cache = False
    return model


def main():
    tok = build_tokenizer()
    model = build_model(tok)
    raw = load_dataset("json", data_files=DATA, split="train").train_test_split(0.01, seed=3)

    def tokenize(rows):
        return tok(rows["text"], truncation=True, max_length=BLOCK, padding="max_length")

    data = raw.map(tokenize, batched=True, remove_columns=["text"])
    trainer = Trainer(
        model=model,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        args=TrainingArguments(
            output_dir=OUT,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            num_train_epochs=1,
            learning_rate=2e-4,
            warmup_steps=100,
            fp16=True,
            logging_steps=10,
            evaluation_strategy="steps",
            eval_steps=200,
            save_steps=200,
            save_total_limit=3,
            report_to=[],
        ),
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )
    trainer.train()
    model.save_pretrained(os.path.join(OUT, "final"))
    tok.save_pretrained(os.path.join(OUT, "final"))


if __name__ == "__main__":
    main()
