import re
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser


@dataclass
class RankArguments:
    dataset_name: str = field(default="ielabgroup/msmarco-setwise-train")
    prompt_file: str = field(default="prompts/setwise_r1.toml")
    max_docs: int = field(default=20)


def format_reward(completions, **kwargs):
    pattern = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL)
    return [1.0 if pattern.match(c[0]["content"].strip()) else 0.0 for c in completions]


def answer_reward(completions, label, **kwargs):
    scores = []
    for c, gold in zip(completions, label):
        m = re.search(r"<answer>(.*?)</answer>", c[0]["content"], re.DOTALL)
        scores.append(1.0 if m and m.group(1).strip() == gold.strip() else 0.0)
    return scores


def build_prompt(row, max_docs):
    docs = "\n".join(f"[{i + 1}] {d}" for i, d in enumerate(row["docs"][:max_docs]))
    text = (
        f"Given the query: \"{row['query']}\", which of the following documents is most relevant?\n{docs}\n"
        "Reason inside <think> </think> and give the label inside <answer> </answer>."
    )
    return {"prompt": [{"role": "user", "content": text}], "label": f"[{row['gold'] + 1}]"}


def main():
    parser = TrlParser((RankArguments, GRPOConfig, ModelConfig))
    rank_args, training_args, model_args = parser.parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    train = load_dataset(rank_args.dataset_name, split="train").map(
        build_prompt, fn_kwargs={"max_docs": rank_args.max_docs}
    )
    training_args.model_init_kwargs = {
        "torch_dtype": torch.bfloat16,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[format_reward, answer_reward],
        args=training_args,
        train_dataset=train,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
