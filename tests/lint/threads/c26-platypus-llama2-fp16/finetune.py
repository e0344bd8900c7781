import os
import sys
from typing import List

import fire
import torch
import transformers
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, prepare_model_for_int8_training
from transformers import LlamaForCausalLM, LlamaTokenizer

from utils.prompter import Prompter


def train(
    base_model: str = "",
    data_path: str = "garage-bAInd/Open-Platypus",
    output_dir: str = "./lora-alpaca",
    batch_size: int = 16,
    micro_batch_size: int = 1,
    num_epochs: int = 1,
    learning_rate: float = 4e-4,
    cutoff_len: int = 4096,
    val_set_size: int = 0,
    lr_scheduler: str = "cosine",
    warmup_steps: int = 100,
    lora_r: int = 16,
    lora_alpha: int = 16,
    lora_dropout: float = 0.05,
    lora_target_modules: List[str] = ["gate_proj", "down_proj", "up_proj"],
    train_on_inputs: bool = False,
    add_eos_token: bool = False,
    group_by_length: bool = False,
    prompt_template_name: str = "alpaca",
):
    gradient_accumulation_steps = batch_size // micro_batch_size
    prompter = Prompter(prompt_template_name)
    device_map = "auto"
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    ddp = world_size != 1
    if ddp:
        device_map = {"": int(os.environ.get("LOCAL_RANK") or 0)}
        gradient_accumulation_steps = gradient_accumulation_steps // world_size

    model = LlamaForCausalLM.from_pretrained(base_model, load_in_8bit=True, torch_dtype=torch.float16,
                                             device_map=device_map)
    tokenizer = LlamaTokenizer.from_pretrained(base_model)
    tokenizer.pad_token_id = 0
    tokenizer.padding_side = "left"

    def tokenize(prompt, add_eos_token=True):
        result = tokenizer(prompt, truncation=True, max_length=cutoff_len, padding=False, return_tensors=None)
        if result["input_ids"][-1] != tokenizer.eos_token_id and len(result["input_ids"]) < cutoff_len and add_eos_token:
            result["input_ids"].append(tokenizer.eos_token_id)
            result["attention_mask"].append(1)
        result["labels"] = result["input_ids"].copy()
        return result

    def generate_and_tokenize_prompt(dp):
        full = tokenize(prompter.generate_prompt(dp["instruction"], dp["input"], dp["output"]))
        if not train_on_inputs:
            user = tokenize(prompter.generate_prompt(dp["instruction"], dp["input"]), add_eos_token=add_eos_token)
            n = len(user["input_ids"]) - int(add_eos_token)
            full["labels"] = [-100] * n + full["labels"][n:]
        return full

    model = prepare_model_for_int8_training(model)
    model = get_peft_model(model, LoraConfig(r=lora_r, lora_alpha=lora_alpha, target_modules=lora_target_modules,
                                             lora_dropout=lora_dropout, bias="none", task_type="CAUSAL_LM"))
    data = load_dataset(data_path)
    if val_set_size > 0:
        split = data["train"].train_test_split(test_size=val_set_size, shuffle=True, seed=42)
        train_data = split["train"].shuffle().map(generate_and_tokenize_prompt)
        val_data = split["test"].shuffle().map(generate_and_tokenize_prompt)
    else:
        train_data, val_data = data["train"].shuffle().map(generate_and_tokenize_prompt), None

    trainer = transformers.Trainer(
        model=model,
        train_dataset=train_data,
        eval_dataset=val_data,
        args=transformers.TrainingArguments(
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            warmup_steps=warmup_steps,
            num_train_epochs=num_epochs,
            learning_rate=learning_rate,
            fp16=True,
            logging_steps=1,
            optim="adamw_torch",
            evaluation_strategy="steps" if val_set_size > 0 else "no",
            save_strategy="steps",
            eval_steps=100 if val_set_size > 0 else None,
            save_steps=1000,
            lr_scheduler_type=lr_scheduler,
            output_dir=output_dir,
            save_total_limit=2,
            ddp_find_unused_parameters=False if ddp else None,
            group_by_length=group_by_length,
        ),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, return_tensors="pt",
                                                          padding=True),
    )
    model.config.use_cache = False
    old_state_dict = model.state_dict
    model.state_dict = (lambda self, *_, **__: get_peft_model_state_dict(self, old_state_dict())).__get__(
        model, type(model))
    if torch.__version__ >= "2" and sys.platform != "win32":
        model = torch.compile(model)
    trainer.train()
    model.save_pretrained(output_dir)


if __name__ == "__main__":
    fire.Fire(train)
