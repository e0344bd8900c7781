import torch
from transformers import AutoConfig, AutoModelForCausalLM


def setup_model(config):
    hf = AutoConfig.from_pretrained(config.name, attn_implementation=config.attn)
    hf.use_cache = False
    model = AutoModelForCausalLM.from_pretrained(config.name, config=hf, torch_dtype=torch.float32)
    if config.liger_kernel:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        _apply_liger_kernel_to_instance(model=model)
    if config.ac:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.cuda()


def forward(model, input_ids, position_ids):
    return model(input_ids=input_ids, position_ids=position_ids).logits.float()
