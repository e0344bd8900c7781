import torch
import torch.nn.functional as F
from transformers import Trainer


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
