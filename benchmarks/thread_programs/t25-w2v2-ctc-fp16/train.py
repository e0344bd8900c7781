"""wav2vec2 with CTC: log_softmax and the loss are computed inside of the FP16 autocast, on half logits."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2Model

torch.manual_seed(0)
config = Wav2Vec2Config(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    conv_dim=(16, 16),
    conv_stride=(5, 4),
    conv_kernel=(10, 8),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    mask_time_prob=0.0,
    layerdrop=0.0,
)


class Encoder(nn.Module):
    def __init__(self, tokens=30):
        super().__init__()
        self.wav2vec2 = Wav2Vec2Model(config)
        self.ctc_lin = nn.Linear(32, tokens)

    def forward(self, wavs):
        return self.ctc_lin(self.wav2vec2(F.layer_norm(wavs, wavs.shape[1:])).last_hidden_state)


model = Encoder()
log_softmax = nn.LogSoftmax(dim=-1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu")


def compute_objectives(logits, tokens):
    p_ctc = log_softmax(logits)
    lengths = torch.full((len(logits),), logits.shape[1])
    return F.ctc_loss(p_ctc.transpose(0, 1), tokens, lengths, torch.full((len(tokens),), 8), zero_infinity=True)


for _ in range(8):
    optimizer.zero_grad()
    wavs, tokens = torch.randn(4, 1600), torch.randint(1, 30, (4, 8))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = compute_objectives(model(wavs), tokens)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.3f}")
