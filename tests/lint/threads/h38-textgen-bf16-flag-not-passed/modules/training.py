import json
from pathlib import Path

import torch
import transformers
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_int8_training, set_peft_model_state_dict

import modules.shared as shared

MODEL_TARGETS = {
    "LlamaForCausalLM": ["q_proj", "v_proj"],
    "OPTForCausalLM": ["q_proj", "v_proj"],
    "GPTJForCausalLM": ["q_proj", "v_proj"],
    "GPTNeoXForCausalLM": ["query_key_value"],
}


def encode(text, add_bos_token):
    ids = shared.tokenizer.encode(text, truncation=True, max_length=shared.args.cutoff_len)
    if not add_bos_token and ids and ids[0] == shared.tokenizer.bos_token_id:
        ids = ids[1:]
    return ids


def tokenize(prompt, append_eos_token=True):
    ids = encode(prompt, True)
    if append_eos_token and ids[-1] != shared.tokenizer.eos_token_id and len(ids) < shared.args.cutoff_len:
        ids.append(shared.tokenizer.eos_token_id)
    ids = [shared.tokenizer.pad_token_id] * (shared.args.cutoff_len - len(ids)) + ids
    labels = [1] * len(ids)
    ids_t = torch.tensor(ids)
    return {"input_ids": ids_t, "labels": labels, "attention_mask": ids_t.ne(shared.tokenizer.pad_token_id)}


def generate_prompt(row):
    if row.get("input"):
        return f"### Instruction:\n{row['instruction']}\n\n### Input:\n{row['input']}\n\n### Response:\n{row['output']}"
    return f"### Instruction:\n{row['instruction']}\n\n### Response:\n{row['output']}"


def do_train():
    a = shared.args
    model_type = type(shared.model).__name__
    lora_file_path = Path(a.lora_dir) / a.lora_name
    gradient_accumulation_steps = a.batch_size // a.micro_batch_size
    shared.tokenizer.pad_token_id = 0
    shared.tokenizer.padding_side = "left"

    data = load_dataset("json", data_files=a.dataset)
    train_data = data["train"].map(
        lambda row: tokenize(generate_prompt(row)), remove_columns=data["train"].column_names, new_fingerprint="t"
    )

    if a.load_in_8bit:
        print("Getting model ready...")
        prepare_model_for_int8_training(shared.model)
    config = LoraConfig(
        r=a.lora_rank,
        lora_alpha=a.lora_rank * 2,
        target_modules=MODEL_TARGETS.get(model_type, ["q_proj", "v_proj"]),
        lora_dropout=0.05,
        bias="none",
        task_type="CAUSAL_LM",
    )
    lora_model = get_peft_model(shared.model, config)
    adapter = lora_file_path / "adapter_model.bin"
    if adapter.is_file():
        set_peft_model_state_dict(lora_model, torch.load(adapter))

    trainer = transformers.Trainer(
        model=lora_model,
        train_dataset=train_data,
        args=transformers.TrainingArguments(
            per_device_train_batch_size=a.micro_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            warmup_steps=100,
            num_train_epochs=a.epochs,
            learning_rate=a.learning_rate,
            fp16=False if a.cpu else True,
            optim="adamw_torch",
            logging_steps=5,
            save_strategy="no",
            output_dir=str(lora_file_path),
            lr_scheduler_type="linear",
            no_cuda=a.cpu,
            report_to=[],
        ),
        data_collator=transformers.DataCollatorForLanguageModeling(shared.tokenizer, mlm=False),
    )
    lora_model.config.use_cache = False
    trainer.train()
    lora_model.save_pretrained(lora_file_path)
    with open(lora_file_path / "training_parameters.json", "w") as f:
        json.dump(vars(a), f, indent=2)
