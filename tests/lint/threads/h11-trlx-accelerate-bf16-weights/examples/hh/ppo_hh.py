import json
import math
import os
import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trlx
from trlx.data.default_configs import (
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=1024,
        epochs=10000,
        total_steps=10000,
        batch_size=4,
        checkpoint_interval=10000,
        eval_interval=500,
        pipeline="PromptPipeline",
        trainer="AcceleratePPOTrainer",
        checkpoint_dir="checkpoints/ppo_hh",
    ),
    model=ModelConfig(model_path="gpt2-xl", num_layers_unfrozen=2),
    tokenizer=TokenizerConfig(tokenizer_path="gpt2", truncation_side="left"),
    optimizer=OptimizerConfig(name="adamw", kwargs=dict(lr=1e-6, betas=(0.9, 0.95), eps=1.0e-8, weight_decay=1.0e-6)),
    scheduler=SchedulerConfig(name="cosine_annealing", kwargs=dict(T_max=10000, eta_min=1e-6)),
    method=PPOConfig(
        name="PPOConfig",
        num_rollouts=64,
        chunk_size=16,
        ppo_epochs=4,
        init_kl_coef=0.05,
        target=6,
        horizon=10000,
        gamma=1,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=1,
        scale_reward="running",
        ref_mean=None,
        ref_std=None,
        cliprange_reward=10,
        gen_kwargs=dict(max_new_tokens=128, top_k=0, top_p=1.0, do_sample=True),
    ),
)


def create_reward_fn(name="OpenAssistant/reward-model-deberta-v3-base"):
    device = int(os.environ.get("LOCAL_RANK", 0))
    tokenizer = AutoTokenizer.from_pretrained(name)
    reward_model = AutoModelForSequenceClassification.from_pretrained(name).half().eval().to(device)

    @torch.no_grad()
    def reward_fn(samples, prompts, outputs, **kwargs):
        scores = []
        bs = 32
        for i in range(math.ceil(len(samples) / bs)):
            enc = tokenizer(
                prompts[i * bs:(i + 1) * bs], outputs[i * bs:(i + 1) * bs],
                padding=True, truncation=True, max_length=512, return_tensors="pt",
            ).to(device)
            scores.append(reward_model(**enc).logits[:, 0].float().cpu())
        return torch.cat(scores)

    return reward_fn


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    dataset = load_dataset("Dahoas/rm-static")
    prompts = [{"prompt": x["prompt"]} for x in dataset["train"]]
    eval_prompts = [{"prompt": x["prompt"]} for x in dataset["test"]][:280]
    trlx.train(
        prompts=prompts,
        eval_prompts=eval_prompts,
        reward_fn=create_reward_fn(),
        config=config,
        stop_sequences=["Human:", "human:", "Assistant:", "assistant:"],
    )


if __name__ == "__main__":
    main({} if len(sys.argv) == 1 else json.loads(sys.argv[1]))
