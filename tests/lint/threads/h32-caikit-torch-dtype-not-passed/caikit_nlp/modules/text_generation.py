import os
import tempfile

import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from ..resources.hf_auto_causal_lm import HFAutoCausalLM
from ..toolkit.torch_utils import get_torch_dtype


class TextGeneration:
    def __init__(self, model_name, model):
        self.model_name = model_name
        self.model = model

    @classmethod
    def train(
        cls,
        base_model,
        train_stream,
        torch_dtype=None,
        max_source_length=256,
        max_target_length=128,
        batch_size=8,
        num_epochs=5,
        accumulate_steps=32,
        lr=2e-5,
        random_seed=73,
        **kwargs,
    ):
        torch_dtype = get_torch_dtype(torch_dtype)
        if isinstance(base_model, str):
            model = HFAutoCausalLM.bootstrap(base_model)
            model_name = base_model
        else:
            model, model_name = base_model, base_model.name

        dataset = Dataset.from_list([{"input": r["input"], "output": r["output"]} for r in train_stream])
        tok = model.tokenizer

        def tokenize(row):
            src = tok(row["input"], max_length=max_source_length, truncation=True).input_ids
            tgt = tok(row["output"], max_length=max_target_length, truncation=True).input_ids
            return {"input_ids": src + tgt + [tok.eos_token_id]}

        dataset = dataset.map(tokenize, remove_columns=dataset.column_names)
        checkpoint_dir = os.path.join(tempfile.gettempdir(), "caikit_ckpt")
        args = TrainingArguments(
            output_dir=checkpoint_dir,
            per_device_train_batch_size=batch_size,
            num_train_epochs=num_epochs,
            seed=random_seed,
            learning_rate=lr,
            weight_decay=0.01,
            save_total_limit=3,
            gradient_accumulation_steps=accumulate_steps,
            gradient_checkpointing=True,
            logging_strategy="steps",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            **kwargs,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trainer = Trainer(
            model.model,
            args,
            train_dataset=dataset,
            data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
        )
        trainer.train()
        trainer.save_model(checkpoint_dir)
        tok.save_pretrained(checkpoint_dir)
        model = HFAutoCausalLM.bootstrap(checkpoint_dir, torch_dtype=torch_dtype)
        return cls(model_name, model)

    def save(self, path):
        self.model.model.save_pretrained(path)
        self.model.tokenizer.save_pretrained(path)
