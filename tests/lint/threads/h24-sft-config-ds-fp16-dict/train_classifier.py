import argparse
import json
import os

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

LABELS = ["billing", "delivery", "returns", "technical", "other"]


def ds_config(lr, steps):
    return {
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": lr,
                "warmup_num_steps": int(0.05 * steps),
                "total_num_steps": steps,
            },
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "contiguous_gradients": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def to_chat(row):
    return {
        "messages": [
            {"role": "system", "content": "Classify the ticket as one of: " + ", ".join(LABELS)},
            {"role": "user", "content": row["text"]},
            {"role": "assistant", "content": LABELS[row["label"]]},
        ]
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="microsoft/phi-4")
    parser.add_argument("--train", default="data/tickets_train.jsonl")
    parser.add_argument("--valid", default="data/tickets_valid.jsonl")
    parser.add_argument("--out", default="runs/phi4-tickets")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    data = load_dataset("json", data_files={"train": args.train, "valid": args.valid})
    data = data.map(to_chat, remove_columns=data["train"].column_names)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float16)

    config = SFTConfig(
        output_dir=args.out,
        deepspeed=ds_config(args.lr, args.steps),
        learning_rate=args.lr,
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        max_length=2048,
        packing=False,
        assistant_only_loss=True,
        eval_strategy="steps",
        eval_steps=200,
        save_steps=200,
        logging_steps=10,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["valid"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(args.out)
    with open(os.path.join(args.out, "labels.json"), "w") as f:
        json.dump(LABELS, f)


if __name__ == "__main__":
    main()
