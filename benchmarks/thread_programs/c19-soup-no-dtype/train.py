"""LoRA over a base that is loaded without a dtype: frozen, and in FP32, though its checkpoint is bf16."""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).to(torch.bfloat16).save_pretrained("base")


def load_model(quantization="none"):
    kwargs = {"dtype": torch.float32}  # the default of transformers 4; 5 takes the dtype of the checkpoint
    if quantization == "4bit":
        kwargs["dtype"] = torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained("base", **kwargs)
    model.config.use_cache = False
    return model


transformers.set_seed(0)
model = get_peft_model(load_model(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
args = TrainingArguments(
    output_dir="out",
    max_steps=4,
    learning_rate=2e-4,
    per_device_train_batch_size=4,
    bf16=True,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
Trainer(model=model, args=args, train_dataset=data).train()
print({str(p.dtype) for p in model.parameters()})
