import os
import time

import torch
import torch.distributed as dist
import yaml
from easydict import EasyDict as edict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from data.scenes import SceneDataset
from model.lvsm_scene_decoder import LVSM
from utils.training import build_optimizer, build_scheduler, load_ckpt, save_ckpt


def main(config):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    amp_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[config.training.amp_dtype]

    ds = SceneDataset(config)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, config.training.batch_size_per_gpu, sampler=sampler,
                        num_workers=config.training.num_workers, drop_last=True, pin_memory=True)

    model = DDP(LVSM(config).cuda(), device_ids=[local])
    optimizer = build_optimizer(model, config)
    lr_scheduler = build_scheduler(optimizer, config)
    scaler = torch.amp.GradScaler("cuda", enabled=config.training.use_amp and amp_dtype == torch.float16)
    fwd_step, update_step = load_ckpt(config, model, optimizer, lr_scheduler)

    accum = config.training.grad_accum_steps
    total = config.training.train_steps
    epoch = 0
    it = iter(loader)
    while update_step <= total:
        tic = time.time()
        try:
            batch = next(it)
        except StopIteration:
            epoch += 1
            sampler.set_epoch(epoch)
            it = iter(loader)
            batch = next(it)
        batch = {k: v.cuda(non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}

        with torch.autocast("cuda", enabled=config.training.use_amp, dtype=amp_dtype):
            out = model(batch)

        update = (fwd_step + 1) % accum == 0
        if update:
            scaler.scale(out.loss / accum).backward()
        else:
            with model.no_sync():
                scaler.scale(out.loss / accum).backward()
        fwd_step += 1

        if update:
            skip_optimizer_step = False
            if torch.isnan(out.loss) or torch.isinf(out.loss):
                print(f"NaN or Inf loss at step {fwd_step}, skip this step")
                skip_optimizer_step = True
                out.loss.data = torch.zeros_like(out.loss)

            if not skip_optimizer_step:
                scaler.unscale_(optimizer)
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.nan_to_num_(nan=0.0, posinf=1e-3, neginf=-1e-3)
                total_grad_norm = 0.0
                if config.training.grad_clip_norm > 0:
                    total_grad_norm = torch.nn.utils.clip_grad_norm_(
                        model.parameters(), max_norm=config.training.grad_clip_norm).item()
                    if total_grad_norm > config.training.grad_clip_norm * 2.0:
                        print(f"WARNING: step {fwd_step} grad norm too large {total_grad_norm} > "
                              f"{config.training.grad_clip_norm * 2.0}")
                    allowed = config.training.grad_clip_norm * config.training.get("allowed_gradnorm_factor", 5)
                    if total_grad_norm > allowed:
                        skip_optimizer_step = True
                        print(f"WARNING: step {fwd_step} grad norm too large {total_grad_norm} > {allowed}, "
                              "skipping optimizer step")

                if not skip_optimizer_step:
                    scaler.step(optimizer)
                    scaler.update()
                    lr_scheduler.step()
                    update_step += 1
            optimizer.zero_grad(set_to_none=True)

        if dist.get_rank() == 0 and fwd_step % config.training.print_every == 0:
            print(f"[Epoch {epoch:2d}] | Forward step: {fwd_step:5d} (update {update_step}) | "
                  f"LR {lr_scheduler.get_last_lr()[0]:.6f} | loss {out.loss.item():.5f} | {time.time() - tic:.2f}s")
        if dist.get_rank() == 0 and update_step % config.training.checkpoint_every == 0:
            save_ckpt(config, model, optimizer, lr_scheduler, fwd_step, update_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(edict(yaml.safe_load(open("configs/lvsm_scene.yaml"))))
