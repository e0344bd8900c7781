import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from edit_dataset import EditPairs, collate
from load_flux import LoadPipeline


def encode(pipe, x):
    z = pipe.vae.encode(x.to("cuda", torch.bfloat16)).latent_dist.sample()
    z = (z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    b, c, h, w = z.shape
    packed = pipe._pack_latents(z, b, c, h, w)
    ids = pipe._prepare_latent_image_ids(b, h // 2, w // 2, "cuda", torch.bfloat16)
    return packed, ids


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="/home/cropy/flux_kontext")
    ap.add_argument("--data", default="data/edits")
    ap.add_argument("--batch_size", type=int, default=1)
    ap.add_argument("--steps", type=int, default=5000)
    ap.add_argument("--lr", type=float, default=1e-5)
    args = ap.parse_args()

    pipe = LoadPipeline(args.model)
    pipe.vae.requires_grad_(False)
    pipe.text_encoder.requires_grad_(False)
    pipe.text_encoder_2.requires_grad_(False)
    tr = pipe.transformer
    tr.train()
    opt = torch.optim.AdamW(tr.parameters(), lr=args.lr)
    loader = DataLoader(EditPairs(args.data), args.batch_size, shuffle=True, collate_fn=collate, num_workers=2)

    step = 0
    while step < args.steps:
        for src, tgt, prompts in loader:
            with torch.no_grad():
                emb, pooled, txt_ids = pipe.encode_prompt(prompts, prompts, max_sequence_length=512)
                x0, ids = encode(pipe, tgt)
                cond, cond_ids = encode(pipe, src)
                cond_ids[..., 0] = 1
            noise = torch.randn_like(x0)
            t = torch.sigmoid(torch.randn(len(x0), device="cuda")).to(torch.bfloat16)
            xt = (1 - t[:, None, None]) * x0 + t[:, None, None] * noise
            guidance = torch.full((len(x0),), 1.0, device="cuda", dtype=torch.bfloat16)
            out = tr(hidden_states=torch.cat([xt, cond], 1), timestep=t, guidance=guidance,
                     pooled_projections=pooled, encoder_hidden_states=emb, txt_ids=txt_ids,
                     img_ids=torch.cat([ids, cond_ids], 0), return_dict=False)[0][:, : x0.shape[1]]
            loss = F.mse_loss(out.float(), (noise - x0).float())
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0:
                print(step, loss.item())
            if step % 1000 == 0:
                torch.save(tr.state_dict(), f"flux_{step}.pt")


if __name__ == "__main__":
    main()
