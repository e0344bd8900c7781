import argparse

import evaluate
import numpy as np
from datasets import DatasetDict, load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

model_checkpoint = "google/mt5-small"
source_lang, target_lang = "en", "my"
max_input_length = 128
max_target_length = 128
batch_size = 4


def load_pairs(path):
    raw = load_dataset("csv", data_files=path, delimiter="\t", column_names=["en", "my"])["train"]
    first = raw.train_test_split(0.1, seed=11)
    second = first["test"].train_test_split(0.5, seed=11)
    return DatasetDict(train=first["train"], validation=second["train"], test=second["test"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", default="data/tatoeba_en_my.tsv")
    parser.add_argument("--epochs", type=int, default=1)
    cli = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(model_checkpoint)
    metric = evaluate.load("sacrebleu")
    raw_datasets = load_pairs(cli.pairs)

    def preprocess(examples):
        model_inputs = tokenizer(examples[source_lang], max_length=max_input_length, truncation=True)
        labels = tokenizer(text_target=examples[target_lang], max_length=max_target_length, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    tokenized = raw_datasets.map(preprocess, batched=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_checkpoint)

    args = Seq2SeqTrainingArguments(
        "mt5-translate-en-my",
        evaluation_strategy="epoch",
        learning_rate=2e-5,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        weight_decay=0.01,
        save_total_limit=3,
        num_train_epochs=cli.epochs,
        predict_with_generate=True,
        fp16=True,
    )

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        preds = preds[0] if isinstance(preds, tuple) else preds
        preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        decoded = [p.strip() for p in tokenizer.batch_decode(preds, skip_special_tokens=True)]
        refs = [[r.strip()] for r in tokenizer.batch_decode(labels, skip_special_tokens=True)]
        score = metric.compute(predictions=decoded, references=refs)["score"]
        lens = [np.count_nonzero(p != tokenizer.pad_token_id) for p in preds]
        return {"bleu": round(score, 4), "gen_len": round(float(np.mean(lens)), 4)}

    trainer = Seq2SeqTrainer(
        model,
        args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        tokenizer=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model("mt5-translate-en-my/final")


if __name__ == "__main__":
    main()
