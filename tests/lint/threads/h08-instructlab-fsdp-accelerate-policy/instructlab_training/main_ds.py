import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from .setup_accelerator import setup_accelerator
from .utils import collate


class JsonlDataset(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def setup_model(args):
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        torch_dtype=torch.bfloat16,
        attn_implementation="flash_attention_2",
    )
    model.gradient_checkpointing_enable()
    return model


def train(args, model, optimizer, lr_scheduler, accelerator, loader):
    model.train()
    step = 0
    for epoch in range(args.num_epochs):
        loader.sampler.set_epoch(epoch)
        for batch in tqdm(loader, disable=accelerator.process_index != 0):
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            with accelerator.accumulate(model):
                loss = model(**batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        accelerator.wait_for_everyone()
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            os.path.join(args.output_dir, f"epoch_{epoch}"),
            is_main_process=accelerator.is_main_process, state_dict=state,
        )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name_or_path", required=True)
    p.add_argument("--data_path", required=True)
    p.add_argument("--output_dir", default="ckpt")
    p.add_argument("--num_epochs", type=int, default=7)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--grad_accum", type=int, default=2)
    p.add_argument("--learning_rate", type=float, default=2e-5)
    p.add_argument("--fsdp_sharding_strategy", default="SHARD_GRAD_OP")
    p.add_argument("--cpu_offload_params_fsdp", action="store_true")
    p.add_argument("--lora_r", type=int, default=0)
    args = p.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    data = JsonlDataset(args.data_path)
    loader = DataLoader(
        data, batch_size=args.batch_size, sampler=DistributedSampler(data),
        collate_fn=functools.partial(collate, pad_id=tokenizer.pad_token_id),
    )
    model = setup_model(args)
    accelerator = setup_accelerator(args, model, args.grad_accum)
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    lr_scheduler = get_scheduler("cosine", optimizer, 25, args.num_epochs * len(loader))
    optimizer, lr_scheduler = accelerator.prepare(optimizer, lr_scheduler)
    train(args, model, optimizer, lr_scheduler, accelerator, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
