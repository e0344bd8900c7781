"""QLoRA with flash attention: `prepare_model_for_kbit_training` casts the rest to FP32, and nothing turns bf16 on."""

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AttentionInterface,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)


def checked_attention(_module, query, key, value, _mask, **_):
    """Attend as flash-attn does, which needs a GPU: it refuses FP32."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None


AttentionInterface.register("checked_attention", checked_attention)
transformers.set_seed(0)
LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).to(torch.bfloat16).save_pretrained("base")
model = LlamaForCausalLM.from_pretrained(
    "base",
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    attn_implementation="checked_attention",
    device_map="cpu",
)
model = prepare_model_for_kbit_training(model)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, bias="none", task_type="CAUSAL_LM", target_modules=targets))
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=2e-4,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
Trainer(model=model, args=args, train_dataset=data).train()
