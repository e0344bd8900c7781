import glob
import os

from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class DreamBoothDataset(Dataset):
    def __init__(self, root, prompt, tokenizer, size):
        self.files = sorted(glob.glob(os.path.join(root, "*.png")) + glob.glob(os.path.join(root, "*.jpg")))
        self.ids = tokenizer(prompt, padding="max_length", truncation=True, max_length=tokenizer.model_max_length,
                             return_tensors="pt").input_ids[0]
        self.tf = transforms.Compose([transforms.Resize(size), transforms.RandomCrop(size), transforms.ToTensor(),
                                      transforms.Normalize([0.5], [0.5])])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return {"pixels": self.tf(Image.open(self.files[i]).convert("RGB")), "ids": self.ids}
