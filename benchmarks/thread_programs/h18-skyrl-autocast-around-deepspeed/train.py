"""A worker that calls a DeepSpeed engine with bf16 inside of torch.autocast."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)


class PolicyModel(nn.Module):
    def __init__(self, vocab=128, hidden=32):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.block = nn.TransformerEncoderLayer(hidden, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, sequences, temperature=1.0):
        logits = self.head(self.block(self.emb(sequences))) / temperature
        logp = torch.log_softmax(logits[:, :-1].float(), -1)
        return logp.gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)


class PolicyWorker:
    def __init__(self):
        model = PolicyModel()
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters()
        )

    def training_step(self, sequences, advantages):
        self.model.train()
        with torch.autocast(dtype=torch.bfloat16, device_type="cpu"):
            log_probs = self.model(sequences, temperature=1.0)
            ratio = (log_probs - log_probs.detach()).exp()
            loss = -(ratio * advantages).mean()
        self.model.backward(loss)
        self.model.step()
        return loss.item()


worker = PolicyWorker()
data = TensorDataset(torch.randint(0, 128, (32, 16)), torch.randn(32, 15))
for sequences, advantages in DataLoader(data, batch_size=8):
    loss = worker.training_step(sequences, advantages)
print(f"loss {loss:.3f}")
