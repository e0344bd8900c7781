import json
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchaudio
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from rvc.train.data_utils import FeatureAudio
from rvc.train.losses import discriminator_loss, feature_loss, generator_loss
from rvc.train.models import Generator, MultiPeriodDiscriminator

global_step = 0


def grad_norm(parameters):
    return math.sqrt(sum(p.grad.detach().float().norm(2).item() ** 2 for p in parameters if p.grad is not None))


def train_and_evaluate(rank, epoch, hps, nets, optims, scaler, loader, mel_fn):
    global global_step
    net_g, net_d = nets
    optim_g, optim_d = optims
    fp16 = hps["train"]["fp16_run"]
    net_g.train()
    net_d.train()
    for batch_idx, (phone, wave) in enumerate(loader):
        phone, wave = phone.cuda(rank, non_blocking=True), wave.cuda(rank, non_blocking=True)
        with autocast("cuda", enabled=fp16):
            y_hat = net_g(phone)
            with autocast("cuda", enabled=False):
                y_mel = torch.log(mel_fn(wave.float()).clamp(min=1e-5))
                y_hat_mel = torch.log(mel_fn(y_hat.float()).clamp(min=1e-5))
            y_d_r, y_d_g, _, _ = net_d(wave, y_hat.detach())
            with autocast("cuda", enabled=False):
                loss_disc = discriminator_loss(y_d_r, y_d_g)
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        grad_norm_d = grad_norm(net_d.parameters())
        scaler.step(optim_d)

        with autocast("cuda", enabled=fp16):
            _, y_d_g, fmap_r, fmap_g = net_d(wave, y_hat)
            with autocast("cuda", enabled=False):
                loss_mel = F.l1_loss(y_mel, y_hat_mel) * hps["train"]["c_mel"]
                loss_gen_all = generator_loss(y_d_g) + feature_loss(fmap_r, fmap_g) + loss_mel
        optim_g.zero_grad()
        scaler.scale(loss_gen_all).backward()
        scaler.unscale_(optim_g)
        grad_norm_g = grad_norm(net_g.parameters())
        scaler.step(optim_g)
        scaler.update()

        optim_g.step()
        optim_d.step()

        global_step += 1
        if rank == 0 and global_step % hps["train"]["log_interval"] == 0:
            print(f"epoch {epoch} step {global_step} d {loss_disc.item():.3f} g {loss_gen_all.item():.3f} mel {loss_mel.item():.3f} "
                  f"norm {grad_norm_d:.2f} {grad_norm_g:.2f}")


def main():
    with open(sys.argv[1]) as f:
        hps = json.load(f)
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.manual_seed(hps["train"]["seed"])
    d, t = hps["data"], hps["train"]
    data = FeatureAudio(d, t["segment_size"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, t["batch_size"], sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    net_g, net_d = (DDP(m.cuda(rank), device_ids=[rank]) for m in (Generator(), MultiPeriodDiscriminator()))
    kw = dict(lr=t["learning_rate"], betas=tuple(t["betas"]), eps=t["eps"])
    optim_g, optim_d = torch.optim.AdamW(net_g.parameters(), **kw), torch.optim.AdamW(net_d.parameters(), **kw)
    scheds = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=t["lr_decay"]) for o in (optim_g, optim_d)]
    scaler = GradScaler("cuda", enabled=t["fp16_run"])
    mel_fn = torchaudio.transforms.MelSpectrogram(d["sampling_rate"], d["filter_length"], hop_length=d["hop_length"], n_mels=d["n_mel"]).cuda(rank)
    os.makedirs(hps["model_dir"], exist_ok=True)
    for epoch in range(1, t["epochs"] + 1):
        sampler.set_epoch(epoch)
        train_and_evaluate(rank, epoch, hps, (net_g, net_d), (optim_g, optim_d), scaler, loader, mel_fn)
        for s in scheds:
            s.step()
        if rank == 0 and epoch % hps["save_every_epoch"] == 0:
            for n, m, o in (("G", net_g, optim_g), ("D", net_d, optim_d)):
                torch.save({"model": m.module.state_dict(), "optimizer": o.state_dict(), "iteration": epoch},
                           os.path.join(hps["model_dir"], f"{n}_{global_step}.pth"))


if __name__ == "__main__":
    main()
