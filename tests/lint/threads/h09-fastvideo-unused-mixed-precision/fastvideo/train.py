import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from latent_dataset import LatentDataset, latent_collate
from model import HunyuanTransformer, load_transformer


def sample_sigmas(batch, device, shift=7.0):
    u = torch.rand(batch, device=device)
    return shift * u / (1 + (shift - 1) * u)


def train_one_step(transformer, optimizer, lr_scheduler, loader, gradient_accumulation_steps, max_grad_norm):
    total_loss = 0.0
    optimizer.zero_grad()
    for _ in range(gradient_accumulation_steps):
        latents, embeds, mask = next(loader)
        noise = torch.randn_like(latents)
        sigmas = sample_sigmas(latents.shape[0], latents.device)
        s = sigmas.view(-1, 1, 1, 1, 1)
        noisy = (1.0 - s) * latents + s * noise
        pred = transformer(noisy, embeds, sigmas * 1000, mask)
        loss = torch.mean((pred.float() - (noise - latents).float()) ** 2) / gradient_accumulation_steps
        loss.backward()
        avg = loss.detach().clone()
        dist.all_reduce(avg, op=dist.ReduceOp.AVG)
        total_loss += avg.item()
    grad_norm = transformer.clip_grad_norm_(max_grad_norm)
    optimizer.step()
    lr_scheduler.step()
    return total_loss, grad_norm.item()


def infinite(loader, device):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for latents, embeds, mask in loader:
            yield latents.to(device), embeds.to(device), mask.to(device)
        epoch += 1


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(args.seed + dist.get_rank())

    transformer = load_transformer(
        args.model_type,
        args.pretrained_model_name_or_path,
        torch.float32 if args.master_weight_type == "fp32" else torch.bfloat16,
    )
    if args.gradient_checkpointing:
        transformer.enable_checkpointing()
    transformer = FSDP(
        transformer,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=local_rank,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    transformer.train()
    params = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, betas=(0.9, 0.999), weight_decay=args.weight_decay, eps=1e-8)
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    dataset = LatentDataset(args.data_json_path, args.num_latent_t)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = infinite(
        DataLoader(dataset, sampler=sampler, batch_size=args.train_batch_size, collate_fn=latent_collate,
                   num_workers=args.dataloader_num_workers, drop_last=True),
        device,
    )
    bar = tqdm(range(args.max_train_steps), disable=local_rank > 0)
    for step in range(1, args.max_train_steps + 1):
        loss, grad_norm = train_one_step(
            transformer, optimizer, lr_scheduler, loader, args.gradient_accumulation_steps, args.max_grad_norm
        )
        bar.set_postfix(loss=f"{loss:.4f}", grad_norm=f"{grad_norm:.3f}")
        bar.update(1)
        if step % args.checkpointing_steps == 0:
            state = transformer.state_dict()
            if dist.get_rank() == 0:
                os.makedirs(args.output_dir, exist_ok=True)
                torch.save(state, os.path.join(args.output_dir, f"checkpoint-{step}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model_type", type=str, default="mochi")
    parser.add_argument("--pretrained_model_name_or_path", type=str)
    parser.add_argument("--cache_dir", type=str, default="./cache_dir")
    parser.add_argument("--data_json_path", type=str, required=True)
    parser.add_argument("--num_latent_t", type=int, default=28)
    parser.add_argument("--sp_size", type=int, default=1)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--dataloader_num_workers", type=int, default=10)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--checkpointing_steps", type=int, default=500)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--master_weight_type", type=str, default="fp32")
    parser.add_argument(
        "--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16"],
        help="Whether to use mixed precision.",
    )
    main(parser.parse_args())
