import torch

MODEL = "meta-llama/Llama-2-7b-hf"
TRAIN_FILE = "data/train.jsonl"
VAL_FILE = "data/val.jsonl"
MAX_LEN = 1024
BATCH_SIZE = 2
NUM_EPOCHS = 3
LEARNING_RATE = 2e-5
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
OUT_DIR = "checkpoints"
