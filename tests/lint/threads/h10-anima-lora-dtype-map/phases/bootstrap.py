import random

import numpy as np
import torch
from safetensors.torch import load_file

from modules.dit import AnimaDiT


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def bootstrap(ctx, args):
    seed_all(args.seed)
    ctx.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ctx.dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
    ctx.output_dir = args.output_dir
    ctx.log(f"device={ctx.device} mixed_precision={args.mixed_precision}")
    return ctx


def load_transformer(ctx, args):
    model = AnimaDiT(**args.model)
    state = load_file(args.transformer_path)
    model.load_state_dict(state, strict=False)
    model.requires_grad_(False)
    model.to(ctx.device, dtype=ctx.dtype)
    if args.gradient_checkpointing:
        model.gradient_checkpointing = True
    return model
