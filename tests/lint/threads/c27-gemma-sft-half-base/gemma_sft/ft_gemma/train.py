import os
import sys

path_root = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
sys.path.append(path_root)
from gemma_sft.ft_gemma import config as C

os.environ["CUDA_VISIBLE_DEVICES"] = C.CUDA_VISIBLE_DEVICES

import torch
import transformers
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from tensorboardX import SummaryWriter
from transformers import GemmaForCausalLM, GemmaTokenizer

writer = SummaryWriter(logdir=C.MODEL_SAVE_DIR)


def prepare_model_for_half_training(model, output_embedding_layer_name="lm_head", use_gradient_checkpointing=True,
                                    layer_norm_names=["layer_norm"]):
    for name, param in model.named_parameters():
        param.requires_grad = False
        if param.ndim == 1 and any(n in name for n in layer_norm_names):
            param.data = param.data.to(torch.float32)
        elif output_embedding_layer_name in name:
            param.data = param.data.to(torch.float32)
        else:
            param.data = param.data.to(torch.half)
    if use_gradient_checkpointing:
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model


def save_model_state(model, path, name="adapter_model.bin"):
    os.makedirs(path, exist_ok=True)
    torch.save({k: v.to("cpu") for k, v in model.named_parameters() if v.requires_grad}, os.path.join(path, name))


tokenizer = GemmaTokenizer.from_pretrained(C.PATH_MODEL_PRETRAIN, add_eos_token=True)
tokenizer.padding_side = "left"
ID_PAD, ID_EOS, ID_BOS = 0, 1, 2

model = GemmaForCausalLM.from_pretrained(C.PATH_MODEL_PRETRAIN)
model = prepare_model_for_half_training(model, use_gradient_checkpointing=True, output_embedding_layer_name="lm_head",
                                        layer_norm_names=["post_attention_layernorm", "input_layernorm", "norm"])
model.config.use_cache = False
model = get_peft_model(model, LoraConfig(target_modules=C.TARGET_MODULES, lora_dropout=C.LORA_DROPOUT,
                                         lora_alpha=C.LORA_ALPHA, task_type="CAUSAL_LM", bias="none", r=C.LORA_R))
model.print_trainable_parameters()
model = model.cuda()


def generate_prompt(dp):
    x = tokenizer.encode("<start_of_turn>user\n{}<end_of_turn>\n".format(
        (dp.get("instruction", "") + "\t" + dp.get("input", "")).strip()), add_special_tokens=False)
    y = tokenizer.encode("<start_of_turn>model\n{}<end_of_turn>".format(dp["output"].strip()),
                         add_special_tokens=False)
    if len(x) + len(y) > C.MAX_LENGTH_Q + C.MAX_LENGTH_A:
        x, y = x[: C.MAX_LENGTH_Q], y[: C.MAX_LENGTH_A]
    return {"input_ids": [ID_BOS] + x, "labels": y + [ID_EOS]}


def data_collator(batch):
    n = min(C.MAX_LENGTH_QA, max(len(b["input_ids"]) + len(b["labels"]) for b in batch))
    ids, labels, mask = [], [], []
    for b in batch:
        x, y = b["input_ids"], b["labels"]
        p = n - len(x) - len(y)
        ids.append([ID_PAD] * p + x + y)
        labels.append([-100] * (p + len(x)) + y)
        mask.append([0] * p + [1] * (len(x) + len(y)))
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


class CustomTrainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**{k: v.cuda() for k, v in inputs.items()})
        logs = {"loss": round(outputs.loss.detach().mean().item(), 4), "lr": self.lr_scheduler.get_last_lr()[0]}
        for k, v in logs.items():
            writer.add_scalar(k, v, self.state.global_step)
        self.log(logs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


data = load_dataset("json", data_files=C.DATA_PATH)
trainer = CustomTrainer(
    model=model,
    data_collator=data_collator,
    train_dataset=data["train"].shuffle().map(generate_prompt),
    args=transformers.TrainingArguments(
        gradient_accumulation_steps=C.GRADIENT_ACCUMULATION_STEPS,
        per_device_train_batch_size=C.MICRO_BATCH_SIZE,
        learning_rate=C.LEARNING_RATE,
        num_train_epochs=C.EPOCHS,
        max_grad_norm=1.0,
        logging_steps=20,
        warmup_steps=32,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_total_limit=32,
        save_steps=C.SAVE_STEPS,
        gradient_checkpointing=True,
        remove_unused_columns=False,
        output_dir=C.MODEL_SAVE_DIR,
        report_to=[],
        optim="adamw_torch",
        fp16=True,
    ),
)
trainer.train()
save_model_state(model, C.MODEL_SAVE_DIR)
