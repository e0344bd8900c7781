import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForVision2Seq

DTYPES = {
    "32": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}


class VLMEncoder(nn.Module):
    def __init__(self, name, model_dtype="bf16-mixed", lora_rank=32, lora_alpha=16, freeze=True):
        super().__init__()
        self.model_dtype = model_dtype
        self.vlm = AutoModelForVision2Seq.from_pretrained(name, trust_remote_code=True)
        if freeze:
            self.vlm.requires_grad_(False)
        self.vlm = get_peft_model(
            self.vlm,
            LoraConfig(r=lora_rank, lora_alpha=lora_alpha, lora_dropout=0.0, target_modules="all-linear",
                       init_lora_weights="gaussian"),
        )
        self._apply_model_dtype()

    def _apply_model_dtype(self):
        self.vlm.to(dtype=DTYPES[self.model_dtype])

    def forward(self, input_ids, attention_mask, pixel_values, labels):
        return self.vlm(
            input_ids=input_ids, attention_mask=attention_mask,
            pixel_values=pixel_values.to(DTYPES[self.model_dtype]), labels=labels,
        )
