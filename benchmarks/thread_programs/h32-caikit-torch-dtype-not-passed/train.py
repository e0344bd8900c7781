"""A train() that takes torch_dtype, and passes it neither to the model that it trains nor to the Trainer."""

import argparse

import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, Trainer, TrainingArguments


def bootstrap(name, torch_dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype)


def train(base_model, torch_dtype=None):
    model = bootstrap(base_model)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    trainer.save_model("checkpoint")
    return bootstrap("checkpoint", torch_dtype=torch_dtype)


parser = argparse.ArgumentParser()
parser.add_argument("--torch_dtype", default="float32")
args = parser.parse_args()
BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4)).save_pretrained("base")
print(train("base", getattr(torch, args.torch_dtype)).dtype)
