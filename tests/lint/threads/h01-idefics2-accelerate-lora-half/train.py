import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoProcessor, BitsAndBytesConfig, Idefics2ForConditionalGeneration, get_scheduler

from data import DocVQADataset, VQACollator

USE_LORA = True
USE_QLORA = False


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_id", default="HuggingFaceM4/idefics2-8b")
    parser.add_argument("--train_json", default="data/docvqa_train.json")
    parser.add_argument("--image_dir", default="data/images")
    parser.add_argument("--output_dir", default="runs/idefics2")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--grad_accum", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", default="fp16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def load_model(args):
    if USE_QLORA or USE_LORA:
        lora_config = LoraConfig(
            r=8,
            lora_alpha=8,
            lora_dropout=0.1,
            target_modules=r".*(text_model|modality_projection|perceiver_resampler).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$",
            use_dora=False if USE_QLORA else True,
            init_lora_weights="gaussian",
        )
        bnb_config = None
        if USE_QLORA:
            bnb_config = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
            )
        model = Idefics2ForConditionalGeneration.from_pretrained(
            args.model_id,
            torch_dtype=torch.float16,
            quantization_config=bnb_config,
            low_cpu_mem_usage=True,
        )
        model.add_adapter(lora_config)
        model.enable_adapters()
    else:
        model = Idefics2ForConditionalGeneration.from_pretrained(args.model_id, torch_dtype=torch.float16)
    return model


def main():
    args = parse_args()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.grad_accum
    )
    set_seed(args.seed)

    processor = AutoProcessor.from_pretrained(args.model_id, do_image_splitting=False)
    model = load_model(args)
    train_set = DocVQADataset(args.train_json, args.image_dir)
    loader = DataLoader(
        train_set, batch_size=args.batch_size, shuffle=True, collate_fn=VQACollator(processor), num_workers=4
    )

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.01)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=50, num_training_steps=args.epochs * len(loader)
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    for epoch in range(args.epochs):
        model.train()
        bar = tqdm(loader, disable=not accelerator.is_local_main_process)
        for batch in bar:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            bar.set_postfix(loss=loss.item())
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(os.path.join(args.output_dir, f"epoch_{epoch}"))


if __name__ == "__main__":
    main()
