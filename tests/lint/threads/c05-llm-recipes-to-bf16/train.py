import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, LlamaForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from utils.dataset import PackedTextDataset
from utils.precision import bf16_policy, preserve_fp32_dtype


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base-model", default="meta-llama/Llama-2-7b-hf")
    ap.add_argument("--train-data-path", required=True)
    ap.add_argument("--save", default="checkpoints")
    ap.add_argument("--seq-length", type=int, default=4096)
    ap.add_argument("--micro-batch-size", type=int, default=1)
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--train-iters", type=int, default=2000)
    ap.add_argument("--bf16", action="store_true")
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    tokenizer = AutoTokenizer.from_pretrained(args.base_model)
    model = LlamaForCausalLM.from_pretrained(args.base_model, use_cache=False, attn_implementation="sdpa")
    model.gradient_checkpointing_enable()
    if args.bf16:
        model.to(torch.bfloat16)

    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy,
                                           transformer_layer_cls={LlamaDecoderLayer}),
        mixed_precision=bf16_policy if args.bf16 else None,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=local,
        limit_all_gathers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 100, args.train_iters)

    ds = PackedTextDataset(args.train_data_path, tokenizer, args.seq_length)
    loader = DataLoader(ds, args.micro_batch_size, sampler=DistributedSampler(ds), drop_last=True)
    it = iter(loader)
    for step in range(args.train_iters):
        try:
            batch = next(it)
        except StopIteration:
            it = iter(loader)
            batch = next(it)
        ids = batch.cuda(local)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"iteration {step} lm loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.3e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
