"""The Trainer with --bf16 and a DeepSpeed config whose flags are the strings "true" and "false"."""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

parser = transformers.HfArgumentParser((transformers.TrainingArguments,))
(training_args,) = parser.parse_args_into_dataclasses()
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
Trainer(model=model, args=training_args, train_dataset=data).train()
