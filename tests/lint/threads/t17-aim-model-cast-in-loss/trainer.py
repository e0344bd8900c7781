import torch
from transformers import Trainer


def collate_fn(examples):
    inputs = torch.stack([example[0] for example in examples])
    labels = torch.tensor([example[1] for example in examples])
    return {"inputs": inputs, "labels": labels}


class Stage2Trainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        x, y = inputs["inputs"], inputs["labels"]
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        unwrapped = model.module if hasattr(model, "module") else model
        if unwrapped.get_projector_weight_dtype() != dtype:
            model = model.to(dtype=dtype)
            x = x.to(dtype=dtype)

        logits, target = model(x, y)
        logits = logits.view(-1, logits.shape[-1])
        target = target.view(-1)
        loss = torch.nn.CrossEntropyLoss()(logits, target)
        return (loss, None) if return_outputs else loss

    def get_decay_parameter_names(self, model):
        return [n for n, p in model.named_parameters() if p.requires_grad and p.dim() >= 2]
