import torch
import torch.nn.functional as F
from torch import nn


class Subsampling(nn.Module):
    def __init__(self, idim, odim):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, odim, 3, 2), nn.ReLU(), nn.Conv2d(odim, odim, 3, 2), nn.ReLU())
        self.out = nn.Linear(odim * (((idim - 1) // 2 - 1) // 2), odim)

    def forward(self, x, lens):
        x = self.conv(x.unsqueeze(1))
        b, c, t, f = x.shape
        return self.out(x.transpose(1, 2).reshape(b, t, c * f)), ((lens - 1) // 2 - 1) // 2


class ASRModel(nn.Module):
    def __init__(self, cfg, idim=80):
        super().__init__()
        e, d, v = cfg["encoder"], cfg["decoder"], cfg["vocab_size"]
        self.ctc_weight, self.sos = cfg["ctc_weight"], v - 1
        self.embed = Subsampling(idim, e["dim"])
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(e["dim"], e["heads"], 2048, batch_first=True), e["layers"])
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(d["dim"], d["heads"], 2048, batch_first=True), d["layers"])
        self.tok, self.out, self.ctc = nn.Embedding(v, d["dim"]), nn.Linear(d["dim"], v), nn.Linear(e["dim"], v)

    def forward(self, speech, speech_lens, text, text_lens):
        x, lens = self.embed(speech, speech_lens)
        pad = torch.arange(x.shape[1], device=x.device)[None] >= lens[:, None]
        h = self.encoder(x, src_key_padding_mask=pad)
        with torch.autocast("cuda", enabled=False):
            logp = self.ctc(h.float()).log_softmax(-1).transpose(0, 1)
            l_ctc = F.ctc_loss(logp, text.clamp(min=0), lens, text_lens, zero_infinity=False)
        ys_in = torch.cat([torch.full_like(text[:, :1], self.sos), text[:, :-1].clamp(min=0)], dim=1)
        m = nn.Transformer.generate_square_subsequent_mask(ys_in.shape[1], device=x.device)
        dec = self.out(self.decoder(self.tok(ys_in), h, tgt_mask=m, memory_key_padding_mask=pad))
        l_att = F.cross_entropy(dec.flatten(0, 1), text.flatten(), ignore_index=-1, label_smoothing=0.1)
        return self.ctc_weight * l_ctc + (1 - self.ctc_weight) * l_att
