import sys

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from trl import SFTConfig, SFTTrainer

from soup_cli.config import load_config
from soup_cli.loader import load_model, load_tokenizer


def build_args(cfg):
    t = cfg.training
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return SFTConfig(
        output_dir=cfg.output,
        num_train_epochs=t.epochs,
        learning_rate=t.lr,
        per_device_train_batch_size=t.batch_size,
        gradient_accumulation_steps=t.gradient_accumulation_steps,
        max_length=cfg.data.max_length,
        logging_steps=t.logging_steps,
        bf16=bf16,
        fp16=not bf16 and torch.cuda.is_available(),
        lr_scheduler_type="cosine",
        warmup_ratio=0.03,
        save_strategy="epoch",
        report_to="none",
    )


def main(path):
    cfg = load_config(path)
    tok = load_tokenizer(cfg.base)
    model = load_model(cfg)
    if cfg.training.quantization != "none":
        model = prepare_model_for_kbit_training(model)
    l = cfg.training.lora
    model = get_peft_model(model, LoraConfig(r=l.r, lora_alpha=l.alpha, lora_dropout=l.dropout,
                                             target_modules=l.target_modules, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    ds = load_dataset("json", data_files=cfg.data.train, split="train")
    trainer = SFTTrainer(model=model, args=build_args(cfg), train_dataset=ds, processing_class=tok)
    trainer.train()
    trainer.save_model(cfg.output)


if __name__ == "__main__":
    main(sys.argv[1])
