import argparse
import csv
import os

import deepspeed
import torch
import torch.nn.functional as F
import torchaudio
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

from model import AudioVisualNet


class VGGSoundClips(Dataset):
    def __init__(self, root, index, frames=400):
        with open(os.path.join(root, index)) as f:
            self.rows = list(csv.DictReader(f))
        self.root = root
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=80)
        self.frames = frames
        self.tf = transforms.Compose([
            transforms.RandomResizedCrop(224), transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        wav, _ = torchaudio.load(os.path.join(self.root, "wav", r["id"] + ".wav"))
        mel = (self.mel(wav[0]) + 1e-6).log()
        mel = F.pad(mel, (0, max(0, self.frames - mel.shape[-1])))[:, : self.frames]
        image = self.tf(Image.open(os.path.join(self.root, "frame", r["id"] + ".jpg")).convert("RGB"))
        return mel, image, int(r["label"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data/vggsound")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    model = AudioVisualNet(num_classes=309)
    train_set = VGGSoundClips(args.root, "train.csv")
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=train_set
    )
    for epoch in range(args.epochs):
        engine.train()
        for step, (mel, image, label) in enumerate(loader):
            mel, image, label = mel.to(engine.device), image.to(engine.device), label.to(engine.device)
            logits = engine(mel, image)
            loss = F.cross_entropy(logits.float(), label)
            engine.backward(loss)
            engine.step()
            if step % 50 == 0 and engine.global_rank == 0:
                print(epoch, step, loss.item())
        engine.save_checkpoint("ckpt", tag=f"ep{epoch}")


if __name__ == "__main__":
    main()
