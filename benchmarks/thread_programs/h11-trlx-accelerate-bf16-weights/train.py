"""Accelerate with mixed_precision bf16 and ZeRO-2: the model is loaded without a dtype, so in FP32."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
).save_pretrained("base")
torch.manual_seed(0)
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("base")
for block in model.transformer.h[:-1]:  # num_layers_unfrozen
    block.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
data = torch.utils.data.DataLoader(torch.randint(0, 256, (32, 16)), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for tokens in data:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}, weights {accelerator.unwrap_model(model).dtype}")
