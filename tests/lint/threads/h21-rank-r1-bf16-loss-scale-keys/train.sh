#!/bin/bash
deepspeed --include localhost:0,1,2,3 train_grpo.py \
  --deepspeed ds_config.json \
  --model_name_or_path Qwen/Qwen2.5-3B-Instruct \
  --attn_implementation flash_attention_2 \
  --output_dir checkpoints/Rank-R1-3B \
  --bf16 \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \
  --num_generations 8 --max_prompt_length 4096 --max_completion_length 2048 \
  --learning_rate 1e-5 --warmup_ratio 0.1 --num_train_epochs 1 \
  --logging_steps 1 --save_steps 50 --gradient_checkpointing --report_to none
