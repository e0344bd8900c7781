import argparse
import math
import os

import torch
from accelerate import Accelerator
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


class CachedFluxDataset(Dataset):
    def __init__(self, root):
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root) if f.endswith(".pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.load(self.files[i], map_location="cpu")


class FluxNetworkTrainer:
    def __init__(self):
        self.is_swapping_blocks = False

    def prepare_accelerator(self, args):
        return Accelerator(
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            mixed_precision=args.mixed_precision,
        )

    def load_target_model(self, args, weight_dtype):
        model = FluxTransformer2DModel.from_pretrained(
            args.pretrained_model_name_or_path, subfolder="transformer", torch_dtype=weight_dtype
        )
        model.requires_grad_(False)
        if args.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        return get_peft_model(
            model,
            LoraConfig(r=args.network_dim, lora_alpha=args.network_alpha, target_modules=["to_q", "to_k", "to_v", "to_out.0"]),
        )

    def prepare_unet_with_accelerator(self, args, accelerator, unet):
        if not self.is_swapping_blocks:
            return accelerator.prepare(unet)
        return accelerator.prepare(unet, device_placement=[not self.is_swapping_blocks])

    def loss(self, unet, batch, accelerator):
        latents, prompt, pooled = batch["latents"], batch["prompt"], batch["pooled"]
        noise = torch.randn_like(latents)
        t = torch.sigmoid(torch.randn(latents.shape[0], device=latents.device)).to(latents.dtype)
        s = t.view(-1, 1, 1)
        noisy = (1 - s) * latents + s * noise
        with accelerator.autocast():
            pred = unet(
                hidden_states=noisy, encoder_hidden_states=prompt, pooled_projections=pooled, timestep=t,
                img_ids=batch["img_ids"][0], txt_ids=batch["txt_ids"][0], guidance=torch.ones_like(t),
            ).sample
        return torch.nn.functional.mse_loss(pred.float(), (noise - latents).float())

    def train(self, args):
        torch.manual_seed(args.seed)
        accelerator = self.prepare_accelerator(args)
        weight_dtype = torch.bfloat16
        unet = self.load_target_model(args, weight_dtype)
        params = [p for p in unet.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=args.learning_rate)
        loader = DataLoader(CachedFluxDataset(args.train_data_dir), batch_size=args.train_batch_size, shuffle=True)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

        unet = self.prepare_unet_with_accelerator(args, accelerator, unet)
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)

        step = 0
        for epoch in range(math.ceil(args.max_train_steps / len(loader))):
            unet.train()
            for batch in tqdm(loader, disable=not accelerator.is_local_main_process):
                for k in ("latents", "prompt", "pooled"):
                    batch[k] = batch[k].to(weight_dtype)
                with accelerator.accumulate(unet):
                    loss = self.loss(unet, batch, accelerator)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(params, args.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad(set_to_none=True)
                step += 1
                if step >= args.max_train_steps:
                    break
        if accelerator.is_main_process:
            sd = {k: v.contiguous().cpu() for k, v in accelerator.unwrap_model(unet).state_dict().items() if "lora_" in k}
            os.makedirs(args.output_dir, exist_ok=True)
            save_file(sd, os.path.join(args.output_dir, "lora.safetensors"))


def setup_parser():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained_model_name_or_path", required=True)
    p.add_argument("--train_data_dir", required=True)
    p.add_argument("--output_dir", default="output")
    p.add_argument("--train_batch_size", type=int, default=1)
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    p.add_argument("--gradient_checkpointing", action="store_true")
    p.add_argument("--learning_rate", type=float, default=1e-4)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--max_train_steps", type=int, default=1600)
    p.add_argument("--network_dim", type=int, default=16)
    p.add_argument("--network_alpha", type=int, default=16)
    p.add_argument("--mixed_precision", default=None, choices=[None, "no", "fp16", "bf16"])
    p.add_argument("--seed", type=int, default=0)
    return p


if __name__ == "__main__":
    FluxNetworkTrainer().train(setup_parser().parse_args())
