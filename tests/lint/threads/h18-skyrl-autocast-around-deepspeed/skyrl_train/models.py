import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM


class HFModelWrapper(nn.Module):
    def __init__(self, path, use_flash_attention_2=False, bf16=True, target_modules=None):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=True,
            attn_implementation="flash_attention_2" if use_flash_attention_2 else "eager",
            torch_dtype=torch.bfloat16 if bf16 else torch.float32,
        )
        self.model.config.use_cache = False

    def gradient_checkpointing_enable(self):
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, sequences, num_actions, attention_mask=None, temperature=1.0):
        pos = attention_mask.long().cumsum(-1) - 1
        pos.masked_fill_(attention_mask == 0, 1)
        logits = self.model(sequences, attention_mask=attention_mask, position_ids=pos).logits / temperature
        logp = torch.log_softmax(logits[:, :-1].float(), -1)
        logp = logp.gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
        return logp[:, -int(num_actions):]
