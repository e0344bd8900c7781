"""LoRA of SD3 with fp16: the pipeline of the validation casts the transformer that trains, and its LoRA, to fp16."""

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="fp16")
weight_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)
scheduler = FlowMatchEulerDiscreteScheduler()
noise_scheduler = FlowMatchEulerDiscreteScheduler()
vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4, shift_factor=0.0)
transformer = SD3Transformer2DModel(
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=32,
    caption_projection_dim=32,
    pooled_projection_dim=32,
    out_channels=4,
    pos_embed_max_size=16,
)
transformer.requires_grad_(False)
vae.requires_grad_(False)
vae.to(accelerator.device, dtype=torch.float32)
transformer.to(accelerator.device, dtype=weight_dtype)
prompt_embeds, pooled = torch.randn(1, 8, 32, dtype=weight_dtype), torch.randn(1, 32, dtype=weight_dtype)
targets = ["to_k", "to_q", "to_v", "to_out.0"]
transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=targets))
cast_training_params([transformer], dtype=torch.float32)
params = [p for p in transformer.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=4e-4, weight_decay=1e-4)
transformer, optimizer = accelerator.prepare(transformer, optimizer)


def log_validation(pipeline, torch_dtype):
    pipeline = pipeline.to(accelerator.device, dtype=torch_dtype)
    pipeline.set_progress_bar_config(disable=True)
    with torch.autocast(accelerator.device.type, dtype=weight_dtype):
        return pipeline(
            prompt_embeds=prompt_embeds,
            pooled_prompt_embeds=pooled,
            guidance_scale=0.0,
            num_inference_steps=2,
            height=8,
            width=8,
            output_type="latent",
        ).images


for epoch in range(4):
    transformer.train()
    for _ in range(2):
        with accelerator.accumulate(transformer):
            pixels = torch.rand(2, 3, 8, 8, device=accelerator.device) * 2 - 1
            x0 = (vae.encode(pixels.to(vae.dtype)).latent_dist.sample() * vae.config.scaling_factor).to(weight_dtype)
            noise = torch.randn_like(x0)
            idx = torch.randint(0, 1000, (2,))
            t, sigma = noise_scheduler.timesteps[idx], noise_scheduler.sigmas[idx].to(x0.dtype)[:, None, None, None]
            xt = (1 - sigma) * x0 + sigma * noise
            pred = transformer(
                hidden_states=xt,
                timestep=t,
                encoder_hidden_states=prompt_embeds.expand(2, -1, -1),
                pooled_projections=pooled.expand(2, -1),
                return_dict=False,
            )[0]
            pred = pred * (-sigma) + xt
            loss = (pred.float() - x0.float()).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if epoch % 2 == 0:
        pipeline = StableDiffusion3Pipeline(
            accelerator.unwrap_model(transformer), scheduler, vae, None, None, None, None, None, None
        )
        log_validation(pipeline, weight_dtype)
        transformer.train()
print(f"loss {loss.item():.3f}, LoRA {params[0].dtype}")
