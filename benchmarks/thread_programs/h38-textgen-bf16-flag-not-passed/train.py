"""LoRA with the Trainer: --bf16 loads the model in bf16, and fp16=True is passed to TrainingArguments all the same."""

import argparse

import torch
import transformers
from peft import LoraConfig, get_peft_model

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--bf16", action="store_true")
a = parser.parse_args()

config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if a.bf16 else torch.float16)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], bias="none", task_type="CAUSAL_LM")
lora_model = get_peft_model(model, lora)
trainer = transformers.Trainer(
    model=lora_model,
    train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))],
    args=transformers.TrainingArguments(
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=3e-4,
        fp16=False if a.cpu else True,  # noqa: SIM211 (as in the thread)
        optim="adamw_torch",
        save_strategy="no",
        output_dir="out",
        report_to=[],
    ),
)
trainer.train()
