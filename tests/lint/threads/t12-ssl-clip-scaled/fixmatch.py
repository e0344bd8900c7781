import argparse
import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, RandomSampler
from torchvision.models import resnet18

from datasets.cifar_ssl import build_ssl_cifar


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def update(self):
        for k, v in self.model.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)
            else:
                self.shadow[k] = v.clone()


class FixMatch:
    def __init__(self, args):
        self.args = args
        self.model = resnet18(num_classes=args.num_classes).cuda(args.gpu)
        self.ema = EMA(self.model, args.ema_m)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4,
                                         nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.num_train_iter)

    def train(self, lb, ulb, ev):
        args = self.args
        scaler = GradScaler()
        amp_cm = autocast if args.amp else nullcontext
        it = 0
        self.model.train()
        for (x_lb, y_lb), (x_w, x_s) in zip(lb, ulb):
            it += 1
            if it > args.num_train_iter:
                break
            x_lb, x_w, x_s, y_lb = (t.cuda(args.gpu, non_blocking=True) for t in (x_lb, x_w, x_s, y_lb))
            inputs = torch.cat((x_lb, x_w, x_s))
            with amp_cm():
                logits = self.model(inputs)
                logits_lb = logits[:x_lb.shape[0]]
                logits_w, logits_s = logits[x_lb.shape[0]:].chunk(2)
                sup_loss = F.cross_entropy(logits_lb, y_lb)
                pseudo = torch.softmax(logits_w.detach(), dim=-1)
                max_p, target = pseudo.max(dim=-1)
                mask = max_p.ge(args.p_cutoff).float()
                unsup_loss = (F.cross_entropy(logits_s, target, reduction="none") * mask).mean()
                total_loss = sup_loss + args.ulb_loss_ratio * unsup_loss

            if args.amp:
                scaler.scale(total_loss).backward()
                if args.clip > 0:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
                scaler.step(self.optimizer)
                scaler.update()
            else:
                total_loss.backward()
                if args.clip > 0:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
                self.optimizer.step()
            self.scheduler.step()
            self.ema.update()
            self.model.zero_grad()

            if it % args.num_eval_iter == 0:
                acc = self.evaluate(ev)
                print(f"{it} sup {sup_loss.item():.4f} unsup {unsup_loss.item():.4f} acc {acc:.4f}")
                self.save(it)

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        n = ok = 0
        for x, y in loader:
            pred = self.model(x.cuda(self.args.gpu)).argmax(-1).cpu()
            ok += (pred == y).sum().item()
            n += len(y)
        self.model.train()
        return ok / n

    def save(self, it):
        os.makedirs(self.args.save_dir, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "ema": self.ema.shadow, "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(), "it": it}, os.path.join(self.args.save_dir, "latest.pth"))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data_dir", default="./data")
    p.add_argument("--save_dir", default="./saved_models/fixmatch")
    p.add_argument("--num_classes", type=int, default=10)
    p.add_argument("--num_labels", type=int, default=40)
    p.add_argument("--batch_size", type=int, default=64)
    p.add_argument("--uratio", type=int, default=7)
    p.add_argument("--num_train_iter", type=int, default=2 ** 20)
    p.add_argument("--num_eval_iter", type=int, default=5000)
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--ema_m", type=float, default=0.999)
    p.add_argument("--p_cutoff", type=float, default=0.95)
    p.add_argument("--ulb_loss_ratio", type=float, default=1.0)
    p.add_argument("--clip", type=float, default=1)
    p.add_argument("--amp", action="store_true")
    p.add_argument("--gpu", type=int, default=0)
    args = p.parse_args()
    lb, ulb, ev = build_ssl_cifar(args.data_dir, args.num_labels)
    n = args.num_train_iter * args.batch_size
    lb_loader = DataLoader(lb, args.batch_size, sampler=RandomSampler(lb, replacement=True, num_samples=n), num_workers=2)
    ulb_loader = DataLoader(ulb, args.batch_size * args.uratio, num_workers=8,
                            sampler=RandomSampler(ulb, replacement=True, num_samples=n * args.uratio))
    FixMatch(args).train(lb_loader, ulb_loader, DataLoader(ev, 256, num_workers=2))
