"""The Trainer with a DeepSpeed config that enables fp16, with `--torch_dtype float16` and without `--fp16`."""

from dataclasses import dataclass, field

import deepspeed
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

deepspeed.get_accelerator().is_fp16_supported = lambda: True  # its engine runs on a CPU, and only refuses to start


@dataclass
class ModelArguments:
    torch_dtype: str = field(default="float16")


model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).to(getattr(torch, model_args.torch_dtype))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
trainer = Trainer(model=model, args=training_args, train_dataset=data)
trainer.train()
