"""LoRA of Gemma, a bf16 model, with fp16=True: its base weights are cast to half, and its activations overflow."""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import GemmaConfig, GemmaForCausalLM


def prepare_model_for_half_training(model, layer_norm_names, output_embedding_layer_name="lm_head"):
    for name, param in model.named_parameters():
        param.requires_grad = False
        if (param.ndim == 1 and any(n in name for n in layer_norm_names)) or output_embedding_layer_name in name:
            param.data = param.data.to(torch.float32)
        else:
            param.data = param.data.to(torch.half)
    return model


transformers.set_seed(0)
model = GemmaForCausalLM(
    GemmaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        pad_token_id=0,
    )
)
with torch.no_grad():  # Gemma has such activations: above 65504 after a feed-forward layer
    model.model.layers[0].mlp.down_proj.weight *= 2e5
    model.model.layers[0].mlp.up_proj.weight *= 1e3
model = prepare_model_for_half_training(model, ["post_attention_layernorm", "input_layernorm", "norm"])
model.config.use_cache = False
lora = LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], lora_alpha=8, r=4, task_type="CAUSAL_LM", bias="none")
model = get_peft_model(model, lora)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(1, 256, (32, 16))]
trainer = transformers.Trainer(
    model=model,
    train_dataset=data,
    args=transformers.TrainingArguments(
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        learning_rate=2e-4,
        max_steps=10,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        remove_unused_columns=False,
        output_dir="out",
        report_to=[],
        optim="adamw_torch",
        fp16=True,
        use_cpu=True,
    ),
)
trainer.train()
