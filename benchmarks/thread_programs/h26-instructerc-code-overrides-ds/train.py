"""A DeepSpeed config with bf16, which the script overwrites with fp16; the model is cast with `.half()`."""

import json
from pathlib import Path

import deepspeed
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.get_accelerator().is_fp16_supported = lambda: True  # its engine runs on a CPU, and only refuses to start


def get_train_ds_config(batch_size):
    config = json.loads(Path("deepspeed_config.json").read_text())
    config["train_micro_batch_size_per_gpu"] = batch_size
    config["train_batch_size"] = batch_size * deepspeed.comm.get_world_size()
    config["bf16"] = {"enabled": False}
    config["fp16"] = {"enabled": True, "loss_scale_window": 100, "initial_scale_power": 16}
    return config


deepspeed.init_distributed()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).half()
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"])
model = get_peft_model(model, lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=get_train_ds_config(4))
for _ in range(4):
    tokens = torch.randint(0, 256, (4, 16), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
print(f"loss {loss.item():.3f}")
