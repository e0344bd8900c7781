"""Pre-training with LoRA and the Trainer: the model is loaded in bf16, and neither --fp16 nor --bf16 is passed."""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).to(torch.bfloat16).save_pretrained("base")
parser = transformers.HfArgumentParser((TrainingArguments,))
(training_args,) = parser.parse_args_into_dataclasses()
transformers.set_seed(0)
model = AutoModelForCausalLM.from_pretrained("base", dtype="auto")
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
Trainer(model=model, args=training_args, train_dataset=data).train()
