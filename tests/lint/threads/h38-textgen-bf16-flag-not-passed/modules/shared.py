import argparse

model = None
tokenizer = None
model_name = "None"
lora_names = []


def str2bool(v):
    return v if isinstance(v, bool) else v.lower() in ("yes", "true", "t", "y", "1")


parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=54))
parser.add_argument("--model", type=str, help="Name of the model to load by default.")
parser.add_argument("--model-dir", type=str, default="models/", help="Path to directory with all the models")
parser.add_argument("--lora-dir", type=str, default="loras/", help="Path to directory with all the loras")
parser.add_argument("--cpu", action="store_true", help="Use the CPU to generate text. Warning: Training on CPU is extremely slow.")
parser.add_argument("--load-in-8bit", action="store_true", help="Load the model with 8-bit precision (using bitsandbytes).")
parser.add_argument("--bf16", action="store_true", help="Load the model with bfloat16 precision. Requires NVIDIA Ampere GPU.")
parser.add_argument("--trust-remote-code", action="store_true", help="Set trust_remote_code=True while loading a model.")
parser.add_argument("--dataset", type=str, default="training/datasets/alpaca.json")
parser.add_argument("--lora-name", type=str, default="my-lora")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lora-rank", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=3e-4)
parser.add_argument("--cutoff-len", type=int, default=256)
parser.add_argument("--micro-batch-size", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=128)
args = parser.parse_args()
