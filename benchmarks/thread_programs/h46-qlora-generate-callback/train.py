"""QLoRA with the Trainer: a callback calls generate without autocast, where FP32 and bf16 layers meet."""

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class GenerationCallback(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.eval()
            with torch.no_grad():
                model.generate(input_ids=torch.randint(3, 256, (1, 4)), max_new_tokens=4, do_sample=False)
            model.train()


transformers.set_seed(0)
LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).to(torch.bfloat16).save_pretrained("base")
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = LlamaForCausalLM.from_pretrained(
    "base", quantization_config=quantization, device_map="cpu", dtype=torch.bfloat16
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model.lm_head.to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
args = TrainingArguments(
    output_dir="out",
    max_steps=4,
    per_device_train_batch_size=4,
    learning_rate=2e-4,
    bf16=True,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(3, 256, (32, 16))]
Trainer(model=model, args=args, train_dataset=data, callbacks=[GenerationCallback()]).train()
