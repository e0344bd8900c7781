import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from callbacks import SampleCallback


def build(model_id):
    model = AutoModelForCausalLM.from_pretrained(
        model_id,
        device_map="auto",
        torch_dtype=torch.bfloat16,
        attn_implementation="sdpa",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_type="nf4",
        ),
    )
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(
        r=64,
        lora_alpha=16,
        lora_dropout=0.1,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=["lm_head", "embed_tokens"],
    ))
    model.config.use_cache = False
    return model, tokenizer


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model_id", default="mistralai/Mistral-7B-v0.1")
    p.add_argument("--out", default="out")
    p.add_argument("--epochs", type=int, default=3)
    args = p.parse_args()
    model, tokenizer = build(args.model_id)
    data = load_dataset("g-ronimo/oasst2_top4k_en")

    def tok(row):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["conversation"])
        return tokenizer(text, truncation=True, max_length=1024, add_special_tokens=False)

    data = data.map(tok, remove_columns=data["train"].column_names)
    prompts = ["Explain why the sky is blue.", "Write a haiku about the sea.", "What is 17 times 23?"]
    trainer = Trainer(
        model=model,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        args=TrainingArguments(
            output_dir=args.out,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=16,
            gradient_checkpointing=True,
            evaluation_strategy="steps",
            eval_steps=50,
            logging_steps=1,
            save_strategy="epoch",
            num_train_epochs=args.epochs,
            lr_scheduler_type="constant",
            learning_rate=2e-4,
            optim="paged_adamw_32bit",
            bf16=True,
            group_by_length=True,
            report_to="none",
        ),
        callbacks=[SampleCallback(tokenizer, prompts)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
