"""A BERT in torchao's float8: batches of two texts are padded to the longest one only.

The layers emulate FP8, which needs no GPU, and has not the limits of a GPU's kernels.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import BertConfig, BertModel

torch.manual_seed(0)
config = BertConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


class Classifier(nn.Module):
    def __init__(self, num_labels=16):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = nn.Linear(config.hidden_size, num_labels)

    def forward(self, input_ids, attention_mask):
        h = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.cls(h.mean(dim=1))


def collate(batch):
    texts, labels = zip(*batch, strict=True)
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}, torch.tensor(labels)


texts = [(torch.randint(1, 256, (length,)), length % 16) for length in (9, 13, 7, 11, 12, 5, 10, 13)]
loader = DataLoader(texts, batch_size=2, collate_fn=collate)
model = Classifier()
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
loss_fn = nn.CrossEntropyLoss()
for batch, labels in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(**batch)
    loss = loss_fn(logits.float(), labels)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
