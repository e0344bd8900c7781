import argparse
import os
import sys

from datasets import load_dataset

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from caikit_nlp.modules.text_generation import TextGeneration


def billsum(max_rows=2000):
    ds = load_dataset("billsum", split="ca_test").select(range(max_rows))
    return [{"input": "summarize: " + r["text"], "output": r["summary"]} for r in ds]


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--dataset", default="billsum", choices=["billsum"])
    p.add_argument("--model_name", default="bigscience/bloom-560m")
    p.add_argument("--output_dir", required=True)
    p.add_argument("--num_epochs", type=int, default=10)
    p.add_argument("--learning_rate", type=float, default=2e-5)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--accumulate_steps", type=int, default=1)
    p.add_argument("--max_source_length", type=int, default=256)
    p.add_argument("--max_target_length", type=int, default=128)
    p.add_argument("--torch_dtype", default="float32", choices=["float16", "bfloat16", "float32"])
    return p.parse_args()


def main():
    args = parse_args()
    model = TextGeneration.train(
        args.model_name,
        billsum(),
        torch_dtype=args.torch_dtype,
        max_source_length=args.max_source_length,
        max_target_length=args.max_target_length,
        lr=args.learning_rate,
        batch_size=args.batch_size,
        accumulate_steps=args.accumulate_steps,
        num_epochs=args.num_epochs,
    )
    model.save(args.output_dir)


if __name__ == "__main__":
    main()
