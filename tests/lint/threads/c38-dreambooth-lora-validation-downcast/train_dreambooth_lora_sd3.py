import argparse
import copy
import os

import torch
from accelerate import Accelerator
from diffusers import (AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel,
                       StableDiffusion3Pipeline)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from diffusers.utils.torch_utils import is_compiled_module
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm.auto import tqdm


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained_model_name_or_path", required=True)
    p.add_argument("--instance_data_dir", required=True)
    p.add_argument("--instance_prompt", required=True)
    p.add_argument("--validation_prompt", default=None)
    p.add_argument("--validation_epochs", type=int, default=50)
    p.add_argument("--num_validation_images", type=int, default=4)
    p.add_argument("--output_dir", default="sd3-dreambooth-lora")
    p.add_argument("--resolution", type=int, default=512)
    p.add_argument("--rank", type=int, default=4)
    p.add_argument("--train_batch_size", type=int, default=1)
    p.add_argument("--num_train_epochs", type=int, default=200)
    p.add_argument("--gradient_accumulation_steps", type=int, default=4)
    p.add_argument("--learning_rate", type=float, default=4e-4)
    p.add_argument("--lr_scheduler", default="constant")
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    p.add_argument("--seed", type=int, default=None)
    return p.parse_args()


class InstanceImages(Dataset):
    def __init__(self, root, size):
        self.paths = [os.path.join(root, f) for f in sorted(os.listdir(root))]
        self.tf = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor(),
                                      transforms.Normalize([0.5], [0.5])])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return self.tf(Image.open(self.paths[i]).convert("RGB"))


def log_validation(pipeline, args, accelerator, pipeline_args, epoch, torch_dtype, is_final_validation=False):
    print(f"Running validation... generating {args.num_validation_images} images: {args.validation_prompt}")
    pipeline = pipeline.to(accelerator.device, dtype=torch_dtype)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator(device=accelerator.device).manual_seed(args.seed) if args.seed is not None else None
    with torch.autocast(accelerator.device.type, enabled=not is_final_validation):
        images = [pipeline(**pipeline_args, generator=generator).images[0] for _ in range(args.num_validation_images)]
    for i, im in enumerate(images):
        im.save(os.path.join(args.output_dir, f"val_{epoch}_{i}.png"))
    del pipeline
    torch.cuda.empty_cache()


def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps,
                              mixed_precision=args.mixed_precision)
    os.makedirs(args.output_dir, exist_ok=True)
    name = args.pretrained_model_name_or_path
    weight_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(name, subfolder="scheduler")
    sched_copy = copy.deepcopy(scheduler)
    vae = AutoencoderKL.from_pretrained(name, subfolder="vae")
    transformer = SD3Transformer2DModel.from_pretrained(name, subfolder="transformer")
    transformer.requires_grad_(False)
    vae.requires_grad_(False)
    vae.to(accelerator.device, dtype=torch.float32)
    transformer.to(accelerator.device, dtype=weight_dtype)

    text_pipe = StableDiffusion3Pipeline.from_pretrained(name, transformer=None, vae=None, torch_dtype=weight_dtype)
    text_pipe.to(accelerator.device)
    with torch.no_grad():
        prompt_embeds, _, pooled, _ = text_pipe.encode_prompt(args.instance_prompt, None, None,
                                                              do_classifier_free_guidance=False)
    del text_pipe
    torch.cuda.empty_cache()

    transformer.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, init_lora_weights="gaussian",
                                       target_modules=["to_k", "to_q", "to_v", "to_out.0"]))

    def unwrap_model(model):
        model = accelerator.unwrap_model(model)
        return model._orig_mod if is_compiled_module(model) else model

    if args.mixed_precision == "fp16":
        cast_training_params([transformer], dtype=torch.float32)
    params = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=1e-4)
    loader = DataLoader(InstanceImages(args.instance_data_dir, args.resolution), args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(args.lr_scheduler, optimizer)
    transformer, optimizer, loader, lr_scheduler = accelerator.prepare(transformer, optimizer, loader, lr_scheduler)

    bar = tqdm(total=args.num_train_epochs * len(loader), disable=not accelerator.is_local_main_process)
    for epoch in range(args.num_train_epochs):
        transformer.train()
        for px in loader:
            with accelerator.accumulate(transformer):
                x0 = vae.encode(px.to(vae.dtype)).latent_dist.sample()
                x0 = ((x0 - vae.config.shift_factor) * vae.config.scaling_factor).to(weight_dtype)
                noise = torch.randn_like(x0)
                u = compute_density_for_timestep_sampling("logit_normal", len(x0), 0.0, 1.0, 1.29)
                idx = (u * sched_copy.config.num_train_timesteps).long()
                t = sched_copy.timesteps[idx].to(x0.device)
                sigma = sched_copy.sigmas[idx].to(x0.device, x0.dtype)[:, None, None, None]
                xt = (1 - sigma) * x0 + sigma * noise
                pred = transformer(hidden_states=xt, timestep=t, encoder_hidden_states=prompt_embeds.expand(len(x0), -1, -1),
                                   pooled_projections=pooled.expand(len(x0), -1), return_dict=False)[0]
                pred = pred * (-sigma) + xt
                loss = (pred.float() - x0.float()).pow(2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            bar.update(1)
            bar.set_postfix(loss=loss.detach().item())

        if accelerator.is_main_process and args.validation_prompt and epoch % args.validation_epochs == 0:
            pipeline = StableDiffusion3Pipeline.from_pretrained(
                name, vae=vae, transformer=unwrap_model(transformer), torch_dtype=weight_dtype)
            log_validation(pipeline, args, accelerator, {"prompt": args.validation_prompt}, epoch, weight_dtype)

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        layers = get_peft_model_state_dict(unwrap_model(transformer).to(torch.float32))
        StableDiffusion3Pipeline.save_lora_weights(args.output_dir, transformer_lora_layers=layers)
        pipeline = StableDiffusion3Pipeline.from_pretrained(name, torch_dtype=weight_dtype)
        pipeline.load_lora_weights(args.output_dir)
        if args.validation_prompt:
            log_validation(pipeline, args, accelerator, {"prompt": args.validation_prompt}, args.num_train_epochs,
                           weight_dtype, is_final_validation=True)


if __name__ == "__main__":
    main(parse_args())
