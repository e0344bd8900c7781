"""LoRA of a Llama that was pretrained in bf16 with fp16=True: its activations overflow in FP16."""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.set_seed(0)
pretrained = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
with torch.no_grad():  # Llama 2 has such activations: above 65504 after a feed-forward layer
    pretrained.model.layers[0].mlp.down_proj.weight *= 1e8
pretrained.save_pretrained("base")
model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["gate_proj", "up_proj"], bias="none", task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (32, 16))]
trainer = transformers.Trainer(
    model=model,
    train_dataset=data,
    eval_dataset=data[:8],
    args=transformers.TrainingArguments(
        per_device_train_batch_size=4,
        max_steps=10,
        learning_rate=4e-4,
        fp16=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        output_dir="out",
        report_to="none",
        use_cpu=True,
    ),
)
trainer.train()
