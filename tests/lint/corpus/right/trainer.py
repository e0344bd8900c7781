"""The HF Trainer in BF16, full evaluation in BF16 too."""

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(train_dataset, eval_dataset):
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    arguments = TrainingArguments(
        output_dir="out", bf16=True, bf16_full_eval=True, per_device_train_batch_size=8, max_grad_norm=1.0
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=train_dataset, eval_dataset=eval_dataset)
    trainer.train()
