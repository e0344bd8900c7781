import argparse
import json
import math
import os

import deepspeed
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import LlamaForCausalLM, LlamaTokenizer, get_linear_schedule_with_warmup, set_seed

from data_utils.data_loader import ERCDataset, Seq2SeqCollator

parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path", type=str, required=True)
parser.add_argument("--data_dir", type=str, required=True)
parser.add_argument("--output_dir", type=str, required=True)
parser.add_argument("--max_length", type=int, default=1200)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=8)
parser.add_argument("--learning_rate", type=float, default=2e-4)
parser.add_argument("--num_train_epochs", type=int, default=6)
parser.add_argument("--warmup_ratio", type=float, default=0.1)
parser.add_argument("--weight_decay", type=float, default=0.0)
parser.add_argument("--lora", type=lambda v: v == "True", default=True)
parser.add_argument("--lora_dim", type=int, default=16)
parser.add_argument("--lora_alpha", type=int, default=16)
parser.add_argument("--zero_stage", type=int, default=2)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


def get_train_ds_config(batch_size):
    with open(args.deepspeed_config) as f:
        config = json.load(f)
    config["train_micro_batch_size_per_gpu"] = batch_size
    config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    config["train_batch_size"] = batch_size * args.gradient_accumulation_steps * deepspeed.comm.get_world_size()
    config["zero_optimization"]["stage"] = args.zero_stage
    if not args.offload:
        config["zero_optimization"].pop("offload_optimizer", None)
    config["bf16"] = {"enabled": False}
    config["fp16"] = {"enabled": True, "loss_scale_window": 100, "initial_scale_power": 16}
    return config


def build_model():
    model = LlamaForCausalLM.from_pretrained(args.model_name_or_path).half()
    tokenizer = LlamaTokenizer.from_pretrained(args.model_name_or_path)
    tokenizer.pad_token_id = 0
    tokenizer.padding_side = "left"
    if args.lora:
        model = get_peft_model(model, LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=args.lora_dim, lora_alpha=args.lora_alpha, lora_dropout=0.05,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        ))
        model.print_trainable_parameters()
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model, tokenizer


def main():
    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    set_seed(args.seed)
    model, tokenizer = build_model()
    train_set = ERCDataset(os.path.join(args.data_dir, "train.json"))
    sampler = DistributedSampler(train_set, seed=args.seed)
    micro = max(1, args.batch_size // args.gradient_accumulation_steps)
    loader = DataLoader(train_set, batch_size=micro, sampler=sampler, collate_fn=Seq2SeqCollator(tokenizer, args.max_length))
    t_total = math.ceil(len(loader) / args.gradient_accumulation_steps) * args.num_train_epochs
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=args.weight_decay)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(t_total * args.warmup_ratio), t_total)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=get_train_ds_config(micro),
    )
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        engine.train()
        bar = tqdm(loader, disable=engine.global_rank != 0)
        for batch in bar:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            bar.set_description(f"epoch {epoch} loss {loss.item():.4f}")
        if engine.global_rank == 0:
            engine.module.save_pretrained(os.path.join(args.output_dir, f"epoch{epoch}"))


if __name__ == "__main__":
    main()
