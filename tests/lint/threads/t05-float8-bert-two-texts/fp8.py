import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from torchao.float8 import convert_to_float8_training
from transformers import AutoModel, AutoTokenizer

MODEL_NAME = "bert-base-uncased"


class TextPairs(Dataset):
    def __init__(self, texts, labels):
        self.texts, self.labels = texts, labels

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i], self.labels[i]


class Collate:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, batch):
        texts, labels = zip(*batch)
        enc = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        enc["labels"] = torch.tensor(labels)
        return enc


class Classifier(nn.Module):
    def __init__(self, num_labels=16):
        super().__init__()
        self.bert = AutoModel.from_pretrained(MODEL_NAME)
        self.cls = nn.Linear(self.bert.config.hidden_size, num_labels)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        h = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        return self.cls(h.mean(dim=1))


def load_texts(path="texts.tsv"):
    texts, labels = [], []
    with open(path) as f:
        for line in f:
            label, text = line.rstrip("\n").split("\t", 1)
            texts.append(text)
            labels.append(int(label))
    return texts, labels


def main():
    device = torch.device("cuda")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_NAME)
    loader = DataLoader(TextPairs(*load_texts()), batch_size=2, shuffle=True, collate_fn=Collate(tokenizer))
    model = Classifier().to(device, dtype=torch.bfloat16)
    convert_to_float8_training(model)
    optimizer = AdamW(model.parameters(), lr=5e-5)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(3):
        model.train()
        for step, batch in enumerate(loader, 1):
            batch = {k: v.to(device) for k, v in batch.items()}
            labels = batch.pop("labels")
            optimizer.zero_grad()
            loss = loss_fn(model(**batch).float(), labels)
            loss.backward()
            optimizer.step()
            print(f"Epoch {epoch + 1}, Step {step}, Loss: {loss.item()}")
    torch.save(model.state_dict(), "fp8_bert.pt")


if __name__ == "__main__":
    main()
