import math
import sys

import torch


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * min(1.0, epoch / args.warmup_epochs)
    for g in optimizer.param_groups:
        g["lr"] = lr
    return lr


def update_ema(target_params, source_params, rate=0.99):
    for targ, src in zip(target_params, source_params):
        targ.detach().mul_(rate).add_(src, alpha=1 - rate)


def train_one_epoch(model, model_params, ema_params, data_loader, optimizer, device, epoch, loss_scaler, args=None):
    model.train(True)
    optimizer.zero_grad()
    for it, (moments, labels) in enumerate(data_loader):
        lr = adjust_learning_rate(optimizer, it / len(data_loader) + epoch, args)
        moments = moments.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.no_grad():
            mean, logvar = moments.chunk(2, dim=1)
            x = (mean + torch.randn_like(mean) * (0.5 * logvar.clamp(-30, 20)).exp()).mul_(0.2325)

        with torch.cuda.amp.autocast():
            loss = model(x, labels)

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)

        loss_scaler(loss, optimizer, clip_grad=args.grad_clip, parameters=model.parameters(), update_grad=True)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        update_ema(ema_params, model_params, rate=args.ema_rate)
        if it % 20 == 0:
            print(f"Epoch: [{epoch}]  [{it}/{len(data_loader)}]  lr: {lr:.6f}  loss: {loss_value:.4f}")
