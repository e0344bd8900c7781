import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import modules.shared as shared


def load_model(model_name):
    t0 = time.time()
    path = Path(shared.args.model_dir) / model_name
    params = {
        "low_cpu_mem_usage": True,
        "trust_remote_code": shared.args.trust_remote_code,
        "torch_dtype": torch.bfloat16 if shared.args.bf16 else torch.float16,
    }
    if shared.args.cpu:
        params["torch_dtype"] = torch.float32
    else:
        params["device_map"] = "auto"
        if shared.args.load_in_8bit:
            params["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(path, **params)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=shared.args.trust_remote_code)
    print(f"Loaded the model in {time.time() - t0:.2f} seconds.")
    return model, tokenizer
