"""Textual inversion in a pipeline loaded in float16: AdamW trains the half embeddings, without autocast or a scaler."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
CLIPTextModel(
    CLIPTextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=1,
        eos_token_id=2,
    )
).save_pretrained("base/text_encoder")
UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=32,
    attention_head_dim=8,
).save_pretrained("base/unet")
text_encoder = CLIPTextModel.from_pretrained("base/text_encoder", dtype=torch.float16)
unet = UNet2DConditionModel.from_pretrained("base/unet", torch_dtype=torch.float16)
scheduler = DDPMScheduler()
unet.requires_grad_(False)
text_encoder.requires_grad_(False)
embeddings = text_encoder.get_input_embeddings()
embeddings.weight.requires_grad_(True)
optimizer = torch.optim.AdamW([embeddings.weight], lr=1e-3, weight_decay=0.0)
orig = embeddings.weight.detach().clone()
for _ in range(4):
    for _ in range(2):
        latents = torch.randn(1, 4, 8, 8, dtype=torch.float16)
        emb = text_encoder(torch.randint(3, 256, (1, 16)))[0]
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (1,))
        pred = unet(scheduler.add_noise(latents, noise, t), t, encoder_hidden_states=emb).sample
        loss = F.mse_loss(pred, noise)
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        embeddings.weight[:255] = orig[:255]
print(f"embeddings {embeddings.weight.dtype}, loss {loss.item():.3f}")
