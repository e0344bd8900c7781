"""Fabric (which replaced LightningLite) with bf16-mixed: what `setup` returns is thrown away."""

import lightning as L
import torch
from transformers import AlbertConfig, AlbertForPreTraining


def run(fabric, model, optimizer):
    fabric.setup(model, optimizer)
    model.train()
    for _ in range(4):
        ids = torch.randint(0, 256, (4, 16), device=fabric.device)
        sentence_order = torch.randint(0, 2, (4,), device=fabric.device)
        outputs = model(input_ids=ids, labels=ids, sentence_order_label=sentence_order)
        optimizer.zero_grad()
        fabric.backward(outputs.loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"loss {outputs.loss.item():.3f}")


L.seed_everything(0)
config = AlbertConfig(
    vocab_size=256, embedding_size=32, hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=128
)
model = AlbertForPreTraining(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
fabric.launch()
run(fabric, model, optimizer)
