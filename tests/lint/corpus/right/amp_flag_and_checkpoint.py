"""AMP behind a switch: it enables or disables autocast and the scaler, and both are saved."""

import argparse

import torch
import torch.nn.functional as F


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-amp", action="store_true")
    parser.add_argument("--resume")
    args = parser.parse_args()

    net = torch.nn.Linear(256, 256).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=args.use_amp)
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        net.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])

    for _ in range(100):
        x = torch.randn(32, 256, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.use_amp):
            loss = F.mse_loss(net(x), x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}, "last.pt")


if __name__ == "__main__":
    main()
