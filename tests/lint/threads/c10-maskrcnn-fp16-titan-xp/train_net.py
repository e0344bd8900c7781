import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from yacs.config import CfgNode as CN

from coco_helmet import HelmetDetection, collate

_C = CN()
_C.DTYPE = "float32"
_C.OUTPUT_DIR = "output"
_C.MODEL = CN({"NUM_CLASSES": 4})
_C.DATASETS = CN({"ROOT": "", "TRAIN": ""})
_C.SOLVER = CN({"BASE_LR": 0.02, "IMS_PER_BATCH": 16, "MAX_ITER": 45000, "STEPS": (30000, 40000), "CHECKPOINT_PERIOD": 2500})


def do_train(cfg, model, loader, optimizer, scheduler, device):
    use_mixed_precision = cfg.DTYPE == "float16"
    scaler = torch.amp.GradScaler("cuda", enabled=use_mixed_precision)
    it = 0
    model.train()
    while it < cfg.SOLVER.MAX_ITER:
        for images, targets in loader:
            images = [i.to(device) for i in images]
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            with torch.autocast("cuda", dtype=torch.float16, enabled=use_mixed_precision):
                loss_dict = model(images, targets)
                losses = sum(loss_dict.values())
            optimizer.zero_grad()
            scaler.scale(losses).backward()
            prev = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= prev:
                scheduler.step()
            elif dist.get_rank() == 0:
                print(f"gradient overflow, skipping step, reducing loss scale to {scaler.get_scale()}")
            it += 1
            if dist.get_rank() == 0 and it % 20 == 0:
                print(f"iter {it} loss {losses.item():.4f} mem {torch.cuda.max_memory_allocated() >> 20}MB")
            if dist.get_rank() == 0 and it % cfg.SOLVER.CHECKPOINT_PERIOD == 0:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                            "scaler": scaler.state_dict(), "it": it}, os.path.join(cfg.OUTPUT_DIR, f"model_{it}.pth"))
            if it >= cfg.SOLVER.MAX_ITER:
                return


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config-file", default="")
    ap.add_argument("opts", nargs=argparse.REMAINDER)
    args = ap.parse_args()
    cfg = _C.clone()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.freeze()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)

    model = torchvision.models.detection.fasterrcnn_resnet50_fpn(num_classes=cfg.MODEL.NUM_CLASSES).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), cfg.SOLVER.BASE_LR, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, cfg.SOLVER.STEPS)
    ds = HelmetDetection(cfg.DATASETS.ROOT, cfg.DATASETS.TRAIN)
    loader = DataLoader(ds, cfg.SOLVER.IMS_PER_BATCH // dist.get_world_size(), sampler=DistributedSampler(ds),
                        collate_fn=collate, num_workers=4)
    do_train(cfg, model, loader, optimizer, scheduler, torch.device("cuda", local_rank))


if __name__ == "__main__":
    main()
