from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(default="Qwen/Qwen1.5-14B-Chat")
    data_path: str = field(default="data/dpo_pairs.jsonl")
    lora_r: int = field(default=64)
    lora_alpha: int = field(default=16)


def load_pairs(path, tokenizer):
    ds = load_dataset("json", data_files=path, split="train")

    def fmt(row):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], tokenize=False, add_generation_prompt=True
        )
        return {
            "prompt": prompt,
            "chosen": row["good"] + tokenizer.eos_token,
            "rejected": row["bad"] + tokenizer.eos_token,
        }

    return ds.map(fmt, remove_columns=ds.column_names).train_test_split(0.02, seed=1)


def main():
    parser = HfArgumentParser((ScriptArguments, DPOConfig))
    script_args, training_args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    model = AutoModelForCausalLM.from_pretrained(
        script_args.model_name_or_path, torch_dtype=torch.bfloat16, use_cache=False
    )
    peft_config = LoraConfig(
        r=script_args.lora_r,
        lora_alpha=script_args.lora_alpha,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()

    data = load_pairs(script_args.data_path, tokenizer)
    trainer = DPOTrainer(
        model,
        ref_model=None,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        tokenizer=tokenizer,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
