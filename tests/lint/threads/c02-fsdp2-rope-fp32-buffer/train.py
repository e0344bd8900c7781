import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from components import ImportanceNet


class ActivationShards(Dataset):
    def __init__(self, folder):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i])
        return d["acts"].float(), d["target"].float()


def shard(model):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                  output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = shard(ImportanceNet(768, 512, 8, 6, 4096).cuda())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    ds = ActivationShards("acts/train")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=4)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for step, (acts, target) in enumerate(loader):
            pred = model(acts.cuda(non_blocking=True))
            loss = (pred - target.cuda(non_blocking=True)).pow(2).mean() + 1e-4 * pred.abs().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and step % 20 == 0:
                print(epoch, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
