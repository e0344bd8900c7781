"""Lightning with bf16-mixed and peft: the whole model is cast to bf16, the trainable LoRA weights too."""

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

DTYPES = {"32": torch.float32, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


class VLMEncoder(nn.Module):
    def __init__(self, model_dtype="bf16-mixed"):
        super().__init__()
        self.model_dtype = model_dtype
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        self.vlm = LlamaForCausalLM(config)
        self.vlm.requires_grad_(False)
        lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights="gaussian")
        self.vlm = get_peft_model(self.vlm, lora)
        self._apply_model_dtype()

    def _apply_model_dtype(self):
        self.vlm.to(dtype=DTYPES[self.model_dtype])

    def forward(self, tokens):
        return self.vlm(input_ids=tokens, labels=tokens)


class OpenVLAPolicy(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = VLMEncoder()

    def training_step(self, batch, batch_idx):
        return self.encoder(batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.encoder.parameters() if p.requires_grad], lr=2.5e-5, weight_decay=0.0)


L.seed_everything(1)
loader = torch.utils.data.DataLoader(torch.randint(0, 256, (32, 16)), batch_size=4)
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    precision="bf16-mixed",
    max_steps=4,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(OpenVLAPolicy(), loader)
