#!/bin/bash
historical_window=12
deepspeed --master_port=29500 main_new.py \
  --model_name_or_path LLM_bases/LLaMA2 \
  --data_dir processed_data/iemocap/window_${historical_window} \
  --output_dir experiments/LLaMA2/lora/iemocap \
  --batch_size 8 --gradient_accumulation_steps 8 \
  --learning_rate 2e-4 --num_train_epochs 15 \
  --deepspeed_config deepspeed_config.json --zero_stage 2 \
  --lora True --lora_dim 16 --gradient_checkpointing
