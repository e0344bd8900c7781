import functools
import json
import os

import fire
import torch
import torch.distributed as dist
import torch.optim as optim
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from transformers import LlamaForCausalLM, LlamaTokenizer, default_data_collator
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from configs import fsdp_config, train_config
from policies import bfSixteen_mixed, fpSixteen


class ConcatDataset(Dataset):
    def __init__(self, path, tokenizer, chunk):
        with open(path) as f:
            rows = json.load(f)
        buf = []
        for r in rows:
            buf += tokenizer(f"Summarize this dialog:\n{r['dialogue']}\n---\nSummary:\n{r['summary']}").input_ids
            buf.append(tokenizer.eos_token_id)
        self.samples = [buf[i:i + chunk] for i in range(0, len(buf) - chunk, chunk)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        ids = self.samples[i]
        return {"input_ids": ids, "labels": list(ids), "attention_mask": [1] * len(ids)}


def get_policies(cfg, rank):
    mixed_precision_policy = None
    if cfg.mixed_precision:
        bf16_ready = torch.version.cuda and torch.cuda.is_bf16_supported() and dist.is_nccl_available()
        if bf16_ready and not cfg.use_fp16:
            mixed_precision_policy = bfSixteen_mixed
            if rank == 0:
                print("bFloat16 enabled for mixed precision - using bfSixteen policy")
        elif cfg.use_fp16:
            mixed_precision_policy = fpSixteen
            if rank == 0:
                print("FP16 enabled")
        else:
            print("bFloat16 support not present. Using FP32, and not mixed precision")
    wrapping = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return mixed_precision_policy, wrapping


def train(model, loader, optimizer, scheduler, tcfg, rank):
    scaler = ShardedGradScaler() if tcfg.use_fp16 else None
    for epoch in range(tcfg.num_epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for batch in tqdm(loader, disable=rank != 0, desc=f"Training Epoch {epoch}"):
            batch = {k: v.to(torch.cuda.current_device()) for k, v in batch.items()}
            loss = model(**batch).loss
            total += loss.detach().float()
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader):.4f} max mem {torch.cuda.max_memory_allocated() / 2**30:.1f}")
        scheduler.step()
        state = model.state_dict()
        if rank == 0:
            os.makedirs(tcfg.output_dir, exist_ok=True)
            torch.save(state, os.path.join(tcfg.output_dir, f"epoch{epoch}.pt"))


def main(**kwargs):
    tcfg, fcfg = train_config(), fsdp_config()
    for k, v in kwargs.items():
        for c in (tcfg, fcfg):
            if hasattr(c, k):
                setattr(c, k, v)
    dist.init_process_group("nccl")
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    torch.cuda.set_device(local_rank)
    torch.manual_seed(tcfg.seed)

    model = LlamaForCausalLM.from_pretrained(tcfg.model_name, use_cache=False)
    tokenizer = LlamaTokenizer.from_pretrained(tcfg.model_name)
    if fcfg.pure_bf16:
        model.to(torch.bfloat16)
    mp_policy, wrapping_policy = get_policies(fcfg, rank)
    model = FSDP(
        model,
        auto_wrap_policy=wrapping_policy,
        cpu_offload=CPUOffload(offload_params=True) if fcfg.fsdp_cpu_offload else None,
        mixed_precision=mp_policy if not fcfg.pure_bf16 else None,
        sharding_strategy=fcfg.sharding_strategy,
        device_id=torch.cuda.current_device(),
        limit_all_gathers=True,
    )
    data = ConcatDataset(tcfg.dataset_path, tokenizer, tcfg.context_length)
    loader = DataLoader(
        data, batch_size=tcfg.batch_size_training, sampler=DistributedSampler(data, shuffle=True),
        num_workers=tcfg.num_workers_dataloader, collate_fn=default_data_collator, drop_last=True, pin_memory=True,
    )
    optimizer = optim.AdamW(model.parameters(), lr=tcfg.lr, weight_decay=tcfg.weight_decay)
    train(model, loader, optimizer, StepLR(optimizer, step_size=1, gamma=tcfg.gamma), tcfg, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
