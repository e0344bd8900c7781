import os

import torch
import torch.optim as optim
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import LlamaForCausalLM, LlamaTokenizer

import config
from dataset import PromptDataset


def evaluate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in loader:
            batch = {k: v.to(config.DEVICE) for k, v in batch.items()}
            total += model(**batch).loss.item()
    model.train()
    return total / len(loader)


def main():
    tokenizer = LlamaTokenizer.from_pretrained(config.MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    model = LlamaForCausalLM.from_pretrained(config.MODEL, attn_implementation="flash_attention_2",
                                             torch_dtype=torch.float16)
    train_loader = DataLoader(PromptDataset(config.TRAIN_FILE, tokenizer, config.MAX_LEN), config.BATCH_SIZE,
                              shuffle=True)
    val_loader = DataLoader(PromptDataset(config.VAL_FILE, tokenizer, config.MAX_LEN), config.BATCH_SIZE)

    optimizer = optim.AdamW(model.parameters(), lr=config.LEARNING_RATE)
    device = config.DEVICE
    model.to(device)
    clip_value = 1

    model.train()
    for epoch in range(config.NUM_EPOCHS):
        total_loss = 0
        for batch_idx, batch in enumerate(tqdm(train_loader)):
            input_ids = batch["input_ids"].to(device)
            attention_mask = batch["attention_mask"].to(device)
            labels = batch["labels"].to(device)
            optimizer.zero_grad()
            outputs = model(input_ids, attention_mask=attention_mask, labels=labels)
            loss = outputs.loss
            total_loss += loss.item()
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            if batch_idx % 20 == 0:
                print(f"epoch {epoch} batch {batch_idx} loss {loss.item()}")
        print(f"epoch {epoch} train {total_loss / len(train_loader)} val {evaluate(model, val_loader)}")
        model.save_pretrained(os.path.join(config.OUT_DIR, f"epoch{epoch}"))


if __name__ == "__main__":
    main()
