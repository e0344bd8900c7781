import json
import os

from PIL import Image
from torch.utils.data import Dataset


class DocVQADataset(Dataset):
    def __init__(self, json_path, image_dir):
        with open(json_path) as f:
            self.samples = json.load(f)
        self.image_dir = image_dir

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        s = self.samples[idx]
        image = Image.open(os.path.join(self.image_dir, s["image"])).convert("RGB")
        return {"image": image, "question": s["question"], "answer": s["answers"][0]}


class VQACollator:
    def __init__(self, processor):
        self.processor = processor
        self.image_token_id = processor.tokenizer.additional_special_tokens_ids[
            processor.tokenizer.additional_special_tokens.index("<image>")
        ]

    def __call__(self, examples):
        texts, images = [], []
        for ex in examples:
            messages = [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ex["question"]}]},
                {"role": "assistant", "content": [{"type": "text", "text": ex["answer"]}]},
            ]
            texts.append(self.processor.apply_chat_template(messages, add_generation_prompt=False).strip())
            images.append([ex["image"]])
        batch = self.processor(text=texts, images=images, return_tensors="pt", padding=True)
        labels = batch["input_ids"].clone()
        labels[labels == self.processor.tokenizer.pad_token_id] = self.image_token_id
        batch["labels"] = labels
        return batch
