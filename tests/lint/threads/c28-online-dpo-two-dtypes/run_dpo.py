import os
import sys
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer, ModelConfig


@dataclass
class ScriptArguments:
    ref_model: Optional[str] = field(default="")
    train_dir: Optional[str] = field(default="./data/uf_split0_responses_K8_reward.json")
    eval_dir: Optional[str] = field(default=None)
    choose_type: Optional[str] = field(default="max_min")
    eos_padding: Optional[bool] = field(default=True)
    ignore_bias_buffers: Optional[bool] = field(default=False)
    len_penalty: Optional[float] = field(default=0)


def prepare_data(data_dir, choose_type="max_min", margin_scale=1.0, length_penalty=0.0):
    ds = load_dataset("json", data_files=data_dir, split="train", field="instances")
    pos, neg, prompts, margin = [], [], [], []
    for sample in ds:
        rewards = np.array(sample["rewards"]) - length_penalty * np.array([len(a) for a in sample["responses"]])
        if choose_type == "random":
            i0, i1 = 0, 1
        else:
            i0, i1 = int(np.argmax(rewards)), int(np.argmin(rewards))
        if rewards[i0] == rewards[i1]:
            continue
        prompts.append(sample["prompt"])
        pos.append(sample["responses"][i0])
        neg.append(sample["responses"][i1])
        margin.append((rewards[i0] - rewards[i1]) * margin_scale)
    return Dataset.from_dict({"prompt": prompts, "chosen": pos, "rejected": neg, "margin": margin})


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, DPOConfig, ModelConfig))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".yaml"):
        script_args, training_args, model_config = parser.parse_yaml_file(os.path.abspath(sys.argv[1]))
    else:
        script_args, training_args, model_config = parser.parse_args_into_dataclasses()

    model = AutoModelForCausalLM.from_pretrained(
        model_config.model_name_or_path,
        attn_implementation="flash_attention_2",
        torch_dtype=torch.float16,
    )
    model.config.use_cache = False

    if script_args.ignore_bias_buffers:
        model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool
        ]

    ref_name = script_args.ref_model if script_args.ref_model else model_config.model_name_or_path
    model_ref = AutoModelForCausalLM.from_pretrained(
        ref_name,
        torch_dtype=torch.bfloat16,
        attn_implementation="flash_attention_2",
    )

    tokenizer = AutoTokenizer.from_pretrained(model_config.model_name_or_path)
    if script_args.eos_padding:
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        for m in (model, model_ref):
            m.config.vocab_size += 1
            m.config.pad_token_id = tokenizer.pad_token_id
            m.resize_token_embeddings(len(tokenizer))

    train_dataset = prepare_data(script_args.train_dir, script_args.choose_type,
                                 length_penalty=script_args.len_penalty)
    eval_dataset = prepare_data(script_args.eval_dir) if script_args.eval_dir else \
        train_dataset.select(range(min(100, len(train_dataset))))

    trainer = DPOTrainer(model, model_ref, args=training_args, train_dataset=train_dataset,
                         eval_dataset=eval_dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.model.save_pretrained(os.path.join(training_args.output_dir, "final_checkpoint"))
