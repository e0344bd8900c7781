"""The transformer of Flux in torchao's float8: its modulation layers see one row per sample.

The layers emulate FP8, which needs no GPU, and has not the limits of a GPU's kernels.
"""

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

torch.manual_seed(0)
transformer = FluxTransformer2DModel(
    in_channels=16,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
)


def module_filter_fn(mod, _):
    linear = isinstance(mod, torch.nn.Linear)
    return not (linear and (mod.in_features % 16 != 0 or mod.out_features % 16 != 0))


config = Float8LinearConfig(emulate=True)
convert_to_float8_training(transformer, config=config, module_filter_fn=module_filter_fn)
opt = torch.optim.AdamW(transformer.parameters(), lr=1e-5)
ids, txt_ids = torch.zeros(16, 3), torch.zeros(16, 3)
ids[:, 1] = torch.arange(16)
for _ in range(4):
    x0, noise, t = torch.randn(1, 16, 16), torch.randn(1, 16, 16), torch.sigmoid(torch.randn(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = transformer(
            hidden_states=(1 - t) * x0 + t * noise,
            timestep=t,
            pooled_projections=torch.randn(1, 32),
            encoder_hidden_states=torch.randn(1, 16, 32),
            txt_ids=txt_ids,
            img_ids=ids,
            return_dict=False,
        )[0]
    loss = F.mse_loss(out.float(), noise - x0)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
print(f"loss {loss.item():.3f}")
