import math
import os

import accelerate
import torch
import torch.nn.functional as F
from accelerate.logging import get_logger
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

from sketch_dataset import SketchPairs
from train_config import TrainConfig

logger = get_logger(__name__)


def widen_conv_in(unet):
    old = unet.conv_in
    new = torch.nn.Conv2d(old.in_channels * 2, old.out_channels, old.kernel_size, padding=old.padding)
    with torch.no_grad():
        new.weight.zero_()
        new.weight[:, : old.in_channels].copy_(old.weight)
        new.bias.copy_(old.bias)
    unet.conv_in = new
    unet.register_to_config(in_channels=old.in_channels * 2)


def train(config: TrainConfig):
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        mixed_precision=config.mixed_precision,
        log_with=config.log_with,
        project_config=accelerate.utils.ProjectConfiguration(
            project_dir=config.output_dir, logging_dir=os.path.join(config.output_dir, "logs")),
    )
    if config.seed is not None:
        accelerate.utils.set_seed(config.seed)
    name = config.pretrained_model_name_or_path
    noise_scheduler = DDPMScheduler.from_pretrained(name, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(name, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(name, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
    widen_conv_in(unet)
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()

    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    for m in (vae, text_encoder, unet):
        m.to(accelerator.device, dtype=weight_dtype)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=config.learning_rate, weight_decay=1e-2)
    loader = DataLoader(SketchPairs(config.train_data_dir, tokenizer, config.resolution),
                        config.train_batch_size, shuffle=True, num_workers=4)
    lr_scheduler = get_scheduler(config.lr_scheduler, optimizer, num_warmup_steps=config.lr_warmup_steps,
                                 num_training_steps=config.max_train_steps)
    unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)
    if accelerator.is_main_process:
        accelerator.init_trackers("sketch")

    steps_per_epoch = math.ceil(len(loader) / config.gradient_accumulation_steps)
    global_step = 0
    bar = tqdm(total=config.max_train_steps, disable=not accelerator.is_local_main_process)
    for epoch in range(math.ceil(config.max_train_steps / steps_per_epoch)):
        for batch in loader:
            with accelerator.accumulate(unet):
                enc = lambda x: vae.encode(x.to(dtype=weight_dtype)).latent_dist.sample() * vae.config.scaling_factor
                latents, cond = enc(batch["color"]), enc(batch["sketch"])
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),),
                                          device=latents.device).long()
                noisy = noise_scheduler.add_noise(latents, noise, timesteps)
                noisy = torch.cat([noisy, cond], dim=1)
                states = text_encoder(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
                pred = unet(noisy, timesteps, states).sample
                target = noise if noise_scheduler.config.prediction_type == "epsilon" else \
                    noise_scheduler.get_velocity(latents, noise, timesteps)
                loss = F.mse_loss(pred.float(), target.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), config.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                bar.update(1)
                accelerator.log({"loss": loss.item()}, step=global_step)
                if global_step % config.checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(config.output_dir, f"checkpoint-{global_step}"))
                if global_step >= config.max_train_steps:
                    break
    if accelerator.is_main_process:
        accelerator.unwrap_model(unet).save_pretrained(os.path.join(config.output_dir, "unet"))
    accelerator.end_training()


if __name__ == "__main__":
    train(TrainConfig())
