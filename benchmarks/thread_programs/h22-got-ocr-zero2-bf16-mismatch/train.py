"""The Trainer with a DeepSpeed config that enables bf16, without `--bf16 True`."""

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

parser = transformers.HfArgumentParser((transformers.TrainingArguments,))
(training_args,) = parser.parse_args_into_dataclasses()
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
trainer = Trainer(model=LlamaForCausalLM(config), args=training_args, train_dataset=data)
trainer.train()
