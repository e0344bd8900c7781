import json
from dataclasses import dataclass

import fire
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_int8_training
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, LlamaTokenizer

NEW_TOKENS = ["<|user|>", "<|bot|>", "<|ctx|>", "<|end|>"]


class DialogDataset(Dataset):
    def __init__(self, path, tokenizer, cutoff):
        with open(path) as f:
            self.dialogs = [json.loads(x) for x in f]
        self.tok, self.cutoff = tokenizer, cutoff

    def __len__(self):
        return len(self.dialogs)

    def __getitem__(self, i):
        text = ""
        for turn in self.dialogs[i]["turns"]:
            text += ("<|user|>" if turn["role"] == "user" else "<|bot|>") + turn["text"] + "<|end|>"
        ids = self.tok(text, truncation=True, max_length=self.cutoff).input_ids
        return {"input_ids": ids, "labels": list(ids), "attention_mask": [1] * len(ids)}


def train(
    base_model: str = "decapoda-research/llama-7b-hf",
    data_path: str = "data/dialogs.jsonl",
    output_dir: str = "./lora-dialog",
    batch_size: int = 128,
    micro_batch_size: int = 4,
    num_epochs: int = 3,
    learning_rate: float = 3e-4,
    cutoff_len: int = 512,
    lora_r: int = 16,
    lora_alpha: int = 32,
):
    tokenizer = LlamaTokenizer.from_pretrained(base_model)
    tokenizer.pad_token_id = 0
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens({"additional_special_tokens": NEW_TOKENS})

    model = LlamaForCausalLM.from_pretrained(
        base_model, load_in_8bit=True, torch_dtype=torch.float16, device_map="auto"
    )
    model = prepare_model_for_int8_training(model)
    model.resize_token_embeddings(len(tokenizer))

    config = LoraConfig(
        r=lora_r,
        lora_alpha=lora_alpha,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.05,
        bias="none",
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    model.print_trainable_parameters()

    trainer = transformers.Trainer(
        model=model,
        train_dataset=DialogDataset(data_path, tokenizer, cutoff_len),
        args=transformers.TrainingArguments(
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=batch_size // micro_batch_size,
            warmup_steps=100,
            num_train_epochs=num_epochs,
            learning_rate=learning_rate,
            fp16=True,
            logging_steps=10,
            optim="adamw_torch",
            save_strategy="steps",
            save_steps=200,
            output_dir=output_dir,
            save_total_limit=3,
        ),
        data_collator=transformers.DataCollatorForSeq2Seq(
            tokenizer, pad_to_multiple_of=8, return_tensors="pt", padding=True
        ),
    )
    model.config.use_cache = False
    trainer.train()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


if __name__ == "__main__":
    fire.Fire(train)
