"""A 4-bit base that stays frozen, adapters on top."""

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer


def main(dataset):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = AutoModelForCausalLM.from_pretrained(
        "meta-llama/Llama-3.1-8B", quantization_config=quantization, dtype=torch.bfloat16
    )
    base = prepare_model_for_kbit_training(base)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="out", bf16=True), train_dataset=dataset)
    trainer.train()
