import argparse
import itertools
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
import tqdm

from datasets.nerf_synthetic import SubjectLoader
from radiance_fields.ngp import DensityField, RadianceField
from rendering import render_image_with_propnet

parser = argparse.ArgumentParser()
parser.add_argument("--data_root", type=str, default=str(pathlib.Path.cwd() / "data/nerf_synthetic"))
parser.add_argument("--scene", type=str, default="lego")
parser.add_argument("--max_steps", type=int, default=20000)
args = parser.parse_args()

device = "cuda:0"
torch.manual_seed(42)
np.random.seed(42)

init_batch_size = 4096
weight_decay = 1e-5 if args.scene in ["materials", "ficus", "drums"] else 1e-6
num_samples, num_samples_per_prop = 64, 128
near_plane, far_plane = 2.0, 6.0

train_dataset = SubjectLoader(args.scene, args.data_root, "train", num_rays=init_batch_size, device=device)
test_dataset = SubjectLoader(args.scene, args.data_root, "test", num_rays=None, device=device)

proposal_network = DensityField().to(device)
prop_optimizer = torch.optim.Adam(proposal_network.parameters(), lr=1e-2, eps=1e-15, weight_decay=weight_decay)
prop_scheduler = torch.optim.lr_scheduler.MultiStepLR(prop_optimizer, [args.max_steps // 2, args.max_steps * 3 // 4], 0.33)

grad_scaler = torch.cuda.amp.GradScaler(2**10)
radiance_field = RadianceField().to(device)
optimizer = torch.optim.Adam(radiance_field.parameters(), lr=1e-2, eps=1e-15, weight_decay=weight_decay)
scheduler = torch.optim.lr_scheduler.ChainedScheduler([
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100),
    torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.max_steps // 2, args.max_steps * 3 // 4, args.max_steps * 9 // 10], 0.33),
])


@torch.no_grad()
def evaluate():
    radiance_field.eval()
    proposal_network.eval()
    psnrs = []
    for i in range(min(len(test_dataset), 20)):
        data = test_dataset[i]
        rgb, *_ = render_image_with_propnet(radiance_field, proposal_network, data["rays"], num_samples,
                                            num_samples_per_prop, near_plane, far_plane, data["color_bkgd"], chunk=8192)
        mse = F.mse_loss(rgb, data["pixels"])
        psnrs.append((-10.0 * torch.log(mse) / np.log(10.0)).item())
    return sum(psnrs) / len(psnrs)


tic = time.time()
for step in tqdm.tqdm(range(args.max_steps + 1)):
    radiance_field.train()
    proposal_network.train()

    i = torch.randint(0, len(train_dataset), (1,)).item()
    data = train_dataset[i]
    proposal_requires_grad = step < 1000 or step % 5 == 0

    rgb, acc, prop_loss = render_image_with_propnet(
        radiance_field, proposal_network, data["rays"], num_samples, num_samples_per_prop, near_plane, far_plane,
        data["color_bkgd"], proposal_requires_grad=proposal_requires_grad)

    if proposal_requires_grad:
        prop_optimizer.zero_grad()
        prop_loss.backward()
        prop_optimizer.step()
        prop_scheduler.step()

    loss = F.smooth_l1_loss(rgb, data["pixels"])

    optimizer.zero_grad()
    grad_scaler.scale(loss).backward()
    optimizer.step()
    scheduler.step()

    if step % 1000 == 0:
        mse = F.mse_loss(rgb, data["pixels"])
        psnr = -10.0 * torch.log(mse) / np.log(10.0)
        print(f"elapsed_time={time.time() - tic:.2f}s | step={step} | loss={loss:.5f} | psnr={psnr:.2f}")
    if step > 0 and step % args.max_steps == 0:
        print(f"test psnr {evaluate():.2f}")
        torch.save({"radiance_field": radiance_field.state_dict(), "proposal": proposal_network.state_dict(),
                    "optimizer": optimizer.state_dict(), "step": step}, f"ngp_{args.scene}.pt")
