"""A Trainer whose compute_loss casts the whole model to bf16, although bf16=True computes in it already."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments


class AiM(nn.Module):
    def __init__(self, codebook=64, dim=32):
        super().__init__()
        self.vqvae = nn.Conv2d(3, 8, 4, 4)
        self.codebook = nn.Embedding(codebook, 8)
        self.vqvae.requires_grad_(False)
        self.codebook.requires_grad_(False)
        self.cls = nn.Embedding(11, dim)
        self.tok = nn.Embedding(codebook, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.projector = nn.Linear(dim, codebook)

    def get_projector_weight_dtype(self):
        return self.projector.weight.dtype

    def encode(self, x):
        z = self.vqvae(x).flatten(2).transpose(1, 2)
        return torch.cdist(z.float(), self.codebook.weight.float()[None]).argmin(-1)

    def forward(self, tokens, labels):
        return self.projector(self.blocks(torch.cat([self.cls(labels)[:, None], self.tok(tokens)], 1)))


class AiMTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        x, y = inputs["pixel_values"], inputs["labels"]
        net = model.module if hasattr(model, "module") else model
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        if net.get_projector_weight_dtype() != dtype:
            model = model.to(dtype=dtype)
        x = x.to(dtype=dtype)
        with torch.no_grad():
            tokens = net.encode(x)
        logits = model(tokens[:, :-1], y)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


data = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(i % 10)} for i in range(32)]
arguments = TrainingArguments(
    output_dir="out",
    bf16=True,
    max_steps=4,
    per_device_train_batch_size=4,
    learning_rate=4e-4,
    remove_unused_columns=False,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
)
trainer = AiMTrainer(model=AiM(), args=arguments, train_dataset=data)
trainer.train()
print({str(p.dtype) for p in trainer.model.parameters()})
