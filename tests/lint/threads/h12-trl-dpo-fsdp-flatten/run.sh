#!/bin/bash
accelerate launch --config_file fsdp.yaml dpo_qwen.py \
  --model_name_or_path Qwen/Qwen1.5-14B-Chat \
  --data_path data/dpo_pairs.jsonl \
  --output_dir out/dpo-qwen \
  --bf16 True \
  --beta 0.1 --max_length 1024 --max_prompt_length 512 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 8 \
  --learning_rate 5e-6 --num_train_epochs 1 --logging_steps 5 \
  --gradient_checkpointing True --report_to none
