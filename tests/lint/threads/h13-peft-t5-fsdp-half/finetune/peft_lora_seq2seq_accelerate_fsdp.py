import os

import torch
from accelerate import Accelerator
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, default_data_collator, get_linear_schedule_with_warmup


def main():
    accelerator = Accelerator()
    model_name_or_path = "t5-base"
    batch_size = 8
    text_column = "sentence"
    label_column = "label"
    max_length = 64
    lr = 1e-3
    num_epochs = 1
    base_path = "temp/data/FinancialPhraseBank-v1.0"

    peft_config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1
    )
    model = AutoModelForSeq2SeqLM.from_pretrained(model_name_or_path, torch_dtype=torch.float16)
    model = get_peft_model(model, peft_config)
    for n, p in model.named_parameters():
        if "lora_" in n:
            p.data = p.data.float()
    accelerator.print(model.print_trainable_parameters())

    dataset = load_dataset(
        "json",
        data_files={
            "train": os.path.join(base_path, "financial_phrase_bank_train.jsonl"),
            "validation": os.path.join(base_path, "financial_phrase_bank_val.jsonl"),
        },
    )
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)

    def preprocess(examples):
        inputs = tokenizer(
            examples[text_column], max_length=max_length, padding="max_length", truncation=True, return_tensors="pt"
        )
        labels = tokenizer(
            examples[label_column], max_length=2, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        labels[labels == tokenizer.pad_token_id] = -100
        inputs["labels"] = labels
        return inputs

    with accelerator.main_process_first():
        dataset = dataset.map(preprocess, batched=True, remove_columns=dataset["train"].column_names)
    train_loader = DataLoader(
        dataset["train"], shuffle=True, collate_fn=default_data_collator, batch_size=batch_size, pin_memory=True
    )
    eval_loader = DataLoader(
        dataset["validation"], collate_fn=default_data_collator, batch_size=batch_size, pin_memory=True
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(train_loader) * num_epochs)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    model, train_loader, eval_loader, optimizer, lr_scheduler = accelerator.prepare(
        model, train_loader, eval_loader, optimizer, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        total = 0.0
        for batch in tqdm(train_loader):
            loss = model(**batch).loss
            total += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        eval_loss = 0.0
        for batch in eval_loader:
            with torch.no_grad():
                eval_loss += model(**batch).loss.detach().float()
        accelerator.print(f"{epoch=}: train {total / len(train_loader)} eval {eval_loss / len(eval_loader)}")
        accelerator.wait_for_everyone()
        model.save_pretrained("out/t5-lora", state_dict=accelerator.get_state_dict(model))


if __name__ == "__main__":
    main()
