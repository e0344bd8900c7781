from time import perf_counter

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformer_engine.common import recipe

B, N = 32, 1024
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 128, 4096


class PatchFeatures(Dataset):
    def __init__(self, path, n_tokens=N):
        self.feats = torch.load(path, mmap=True, weights_only=True)
        self.n = n_tokens

    def __len__(self):
        return len(self.feats)

    def __getitem__(self, i):
        return self.feats[i, :self.n].float()


class Encoder(torch.nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(HIDDEN, ffn_hidden_size=HIDDEN * 4, num_attention_heads=HEADS,
                                num_gqa_groups=KV_HEADS, hidden_dropout=0, attention_dropout=0,
                                kv_channels=HEAD_DIM, self_attn_mask_type="no_mask", bias=True)
            for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, attention_mask=None)
        return x


def main(iters=1000):
    loader = DataLoader(PatchFeatures("patch_features.pt"), batch_size=B, shuffle=True, num_workers=4, drop_last=True)
    mha = Encoder().cuda()
    params = list(mha.parameters())
    opt = torch.optim.AdamW(params, lr=1e-4)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)
    print(f"Number of parameters: {sum(p.numel() for p in params) / 1e6:.1f} M")

    done, start = 0, perf_counter()
    bar = tqdm(total=iters)
    while done < iters:
        for seq in loader:
            seq = seq.cuda(non_blocking=True).transpose(0, 1).contiguous()
            target = seq.roll(1, dims=0)
            opt.zero_grad()
            with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
                out = mha(seq)
            loss = F.mse_loss(out, target)
            loss.backward()
            opt.step()
            done += 1
            bar.update()
            if done == iters:
                break
    torch.cuda.synchronize()
    print(f"{(perf_counter() - start) / iters * 1e3:.2f} ms/iter, "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    torch.save(mha.state_dict(), "te_encoder.pt")


if __name__ == "__main__":
    main()
