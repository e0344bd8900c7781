import os
import random

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, DiffusionPipeline
from PIL import Image
from torchvision import transforms

base_model_path = "stabilityai/stable-diffusion-xl-base-1.0"
images_path = "./images"
learned_embeddings_path = "./learned_embeddings"
lr = 1e-3
steps = 800
resolution = 1024
accumulation = 4
train_embedding = "mytoken"
init_word = "person"
templates = ["a photo of {}", "a portrait of {}", "a close-up picture of {}", "{} in a studio"]

base = DiffusionPipeline.from_pretrained(
    base_model_path,
    torch_dtype=torch.float16,
    variant="fp16",
    use_safetensors=True,
    add_watermarker=False,
    scheduler=DDPMScheduler(num_train_timesteps=1000, prediction_type="epsilon", beta_start=0.00085, beta_end=0.012,
                            beta_schedule="scaled_linear", clip_sample=False),
)
base.disable_xformers_memory_efficient_attention()
torch.set_grad_enabled(True)
_ = base.to("cuda")
for m in (base.unet, base.vae, base.text_encoder, base.text_encoder_2):
    m.requires_grad_(False)
base.unet.enable_gradient_checkpointing()
base.unet.train()


def load_images(path):
    tf = transforms.Compose([transforms.Resize(resolution), transforms.CenterCrop(resolution), transforms.ToTensor(),
                             transforms.Normalize([0.5], [0.5])])
    return [tf(Image.open(os.path.join(path, f)).convert("RGB")) for f in sorted(os.listdir(path))]


def force_training_grad(bT=True):
    for enc in (base.text_encoder, base.text_encoder_2):
        enc.text_model.embeddings.token_embedding.weight.requires_grad_(bT)


def add_token(tokenizer, encoder):
    tokenizer.add_tokens(train_embedding)
    encoder.resize_token_embeddings(len(tokenizer))
    tid = tokenizer.convert_tokens_to_ids(train_embedding)
    src = tokenizer.encode(init_word, add_special_tokens=False)[0]
    w = encoder.get_input_embeddings().weight.data
    w[tid] = w[src].clone()
    return tid, w.clone()


def encode_images(imgs):
    with torch.no_grad():
        return [base.vae.encode(x[None].to("cuda", base.vae.dtype)).latent_dist.sample() *
                base.vae.config.scaling_factor for x in imgs]


def training_step(latents, prompt):
    emb, _, pooled, _ = base.encode_prompt(prompt, do_classifier_free_guidance=False)
    noise = torch.randn_like(latents)
    t = torch.randint(0, base.scheduler.config.num_train_timesteps, (1,), device="cuda")
    noisy = base.scheduler.add_noise(latents, noise, t)
    time_ids = torch.tensor([[resolution, resolution, 0, 0, resolution, resolution]], device="cuda", dtype=emb.dtype)
    pred = base.unet(noisy, t, encoder_hidden_states=emb,
                     added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids}).sample
    return F.mse_loss(pred, noise)


def main():
    tid1, orig1 = add_token(base.tokenizer, base.text_encoder)
    tid2, orig2 = add_token(base.tokenizer_2, base.text_encoder_2)
    force_training_grad(True)
    w1 = base.text_encoder.get_input_embeddings().weight
    w2 = base.text_encoder_2.get_input_embeddings().weight
    optimizer = torch.optim.AdamW([w1, w2], lr=lr, weight_decay=0.0)
    latents = encode_images(load_images(images_path))
    for step in range(steps):
        total = 0.0
        for _ in range(accumulation):
            loss = training_step(random.choice(latents), random.choice(templates).format(train_embedding))
            (loss / accumulation).backward()
            total += loss.item() / accumulation
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for w, orig, tid in ((w1, orig1, tid1), (w2, orig2, tid2)):
                keep = torch.arange(len(w), device=w.device) != tid
                w[keep] = orig[keep]
        if step % 10 == 0:
            print(step, f"{total:.5f}", "norm", w1[tid1].norm().item(), w2[tid2].norm().item())
        if step % 100 == 99:
            os.makedirs(learned_embeddings_path, exist_ok=True)
            torch.save({"te1": w1[tid1].detach().cpu(), "te2": w2[tid2].detach().cpu()},
                       os.path.join(learned_embeddings_path, f"{train_embedding}_{step + 1}.pt"))


if __name__ == "__main__":
    main()
