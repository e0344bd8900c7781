import csv
import os
import sys

import torch
import torch.nn.functional as F
import torchaudio
import yaml
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Wav2Vec2Model


class CommonVoice(Dataset):
    def __init__(self, folder, split, vocab):
        self.folder, self.vocab = folder, vocab
        with open(os.path.join(folder, f"{split}.csv")) as f:
            self.rows = list(csv.DictReader(f))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        wav, sr = torchaudio.load(os.path.join(self.folder, r["wav"]))
        wav = torchaudio.functional.resample(wav.mean(0), sr, 16000)
        return wav, torch.tensor([self.vocab.get(c, 1) for c in r["wrd"].lower()])


def collate(batch):
    wavs, toks = zip(*batch)
    lens = torch.tensor([len(w) for w in wavs])
    return pad_sequence(wavs, batch_first=True), lens, pad_sequence(toks, batch_first=True), torch.tensor([len(t) for t in toks])


class Encoder(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.wav2vec2 = Wav2Vec2Model.from_pretrained(hp["wav2vec2_hub"])
        self.wav2vec2.feature_extractor._freeze_parameters()
        d, n = self.wav2vec2.config.hidden_size, hp["dnn_neurons"]
        self.enc = nn.Sequential(nn.Linear(d, n), nn.LayerNorm(n), nn.LeakyReLU(), nn.Linear(n, n), nn.LayerNorm(n), nn.LeakyReLU())
        self.ctc_lin = nn.Linear(n, hp["output_neurons"])

    def forward(self, wavs, lens):
        norm = F.layer_norm(wavs, wavs.shape[1:])
        mask = torch.arange(wavs.shape[1], device=wavs.device)[None] < lens[:, None]
        x = self.wav2vec2(norm, attention_mask=mask.long()).last_hidden_state
        out_lens = self.wav2vec2._get_feat_extract_output_lengths(lens)
        return self.ctc_lin(self.enc(x)), out_lens


class ASR:
    def __init__(self, hp):
        self.hp = hp
        self.device = torch.device("cuda")
        self.model = Encoder(hp).to(self.device)
        self.log_softmax = nn.LogSoftmax(dim=-1)
        w2v = [p for p in self.model.wav2vec2.parameters() if p.requires_grad]
        rest = list(self.model.enc.parameters()) + list(self.model.ctc_lin.parameters())
        self.wav2vec_optimizer = torch.optim.Adam(w2v, lr=hp["lr_wav2vec"])
        self.model_optimizer = torch.optim.Adadelta(rest, lr=hp["lr"], rho=0.95, eps=1e-8)
        self.scaler = torch.cuda.amp.GradScaler(enabled=hp["auto_mix_prec"])

    def compute_forward(self, batch):
        wavs, lens = batch[0].to(self.device), batch[1].to(self.device)
        logits, out_lens = self.model(wavs, lens)
        return self.log_softmax(logits), out_lens

    def compute_objectives(self, predictions, batch):
        p_ctc, out_lens = predictions
        return F.ctc_loss(p_ctc.transpose(0, 1), batch[2].to(self.device), out_lens, batch[3].to(self.device),
                          blank=self.hp["blank_index"], zero_infinity=True)

    def fit_batch(self, batch):
        self.wav2vec_optimizer.zero_grad()
        self.model_optimizer.zero_grad()
        if self.hp["auto_mix_prec"]:
            with torch.cuda.amp.autocast():
                outputs = self.compute_forward(batch)
                loss = self.compute_objectives(outputs, batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.wav2vec_optimizer)
            self.scaler.unscale_(self.model_optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.hp["max_grad_norm"])
            self.scaler.step(self.wav2vec_optimizer)
            self.scaler.step(self.model_optimizer)
            self.scaler.update()
        else:
            loss = self.compute_objectives(self.compute_forward(batch), batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.hp["max_grad_norm"])
            self.wav2vec_optimizer.step()
            self.model_optimizer.step()
        return loss.detach()

    def fit(self, train, valid):
        for epoch in range(self.hp["number_of_epochs"]):
            self.model.train()
            total = sum(self.fit_batch(b).item() for b in train)
            self.model.eval()
            with torch.no_grad():
                val = sum(self.compute_objectives(self.compute_forward(b), b).item() for b in valid)
            print(f"epoch {epoch} train {total / len(train):.3f} valid {val / len(valid):.3f}")
            torch.save({"model": self.model.state_dict(), "scaler": self.scaler.state_dict(), "epoch": epoch},
                       os.path.join(self.hp["output_folder"], "last.ckpt"))


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        hp = yaml.safe_load(f)
    torch.manual_seed(hp["seed"])
    os.makedirs(hp["output_folder"], exist_ok=True)
    vocab = {c: i + 2 for i, c in enumerate(" abcdefghijklmnopqrstuvwxyzàâæçéèêëîïôœùûüÿ'-")}
    loaders = [DataLoader(CommonVoice(hp["data_folder"], s, vocab), hp["batch_size"], shuffle=s == "train",
                          collate_fn=collate, num_workers=6) for s in ("train", "dev")]
    ASR(hp).fit(*loaders)
