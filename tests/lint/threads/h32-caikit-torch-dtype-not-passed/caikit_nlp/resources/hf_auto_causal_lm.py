import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class HFAutoCausalLM:
    def __init__(self, name, model, tokenizer):
        self.name = name
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def bootstrap(cls, model_name, tokenizer_name=None, padding_side="left", torch_dtype=torch.float32):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name or model_name, padding_side=padding_side)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token_id = tokenizer.eos_token_id
        model = AutoModelForCausalLM.from_pretrained(model_name, torch_dtype=torch_dtype)
        return cls(model_name, model, tokenizer)
