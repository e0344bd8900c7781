import argparse

import torch
import yaml
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from dataset import RoIMasks
from mask_head import RefineMaskHead, mask_loss


def do_train(cfg, model, loader, optimizer, scheduler):
    scaler = GradScaler(enabled=cfg["SOLVER"]["AMP"]["ENABLED"])
    it = 0
    while it < cfg["SOLVER"]["MAX_ITER"]:
        for feat, mask, unc in loader:
            feat, mask, unc = feat.cuda(), mask.cuda(), unc.cuda()
            optimizer.zero_grad()
            with autocast(enabled=cfg["SOLVER"]["AMP"]["ENABLED"]):
                losses = mask_loss(*model(feat), mask, unc)
                total = sum(losses.values())
            scaler.scale(total).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            it += 1
            if it % 20 == 0:
                print(it, {k: round(v.item(), 4) for k, v in losses.items()})
            if it % cfg["SOLVER"]["CHECKPOINT_PERIOD"] == 0:
                torch.save({"model": model.state_dict(), "scaler": scaler.state_dict(), "it": it}, f"model_{it}.pth")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--config-file", default="configs/refine_r50.yaml")
    cfg = yaml.safe_load(open(p.parse_args().config_file))
    model = RefineMaskHead().cuda().train()
    opt = torch.optim.SGD(model.parameters(), lr=cfg["SOLVER"]["BASE_LR"], momentum=0.9, weight_decay=1e-4)
    sch = torch.optim.lr_scheduler.MultiStepLR(opt, cfg["SOLVER"]["STEPS"])
    loader = DataLoader(RoIMasks(cfg["DATASETS"]["TRAIN"]), cfg["SOLVER"]["IMS_PER_BATCH"], shuffle=True, num_workers=4)
    do_train(cfg, model, loader, opt, sch)
