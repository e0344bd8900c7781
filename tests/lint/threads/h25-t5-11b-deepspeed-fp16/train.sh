#!/bin/bash
export BS=8
deepspeed --num_gpus=4 run_multitask.py \
  --deepspeed ds_config.json \
  --model_name_or_path t5-11b \
  --train_file data/multitask_train.json \
  --validation_file data/multitask_dev.json \
  --do_train --do_eval \
  --fp16 \
  --per_device_train_batch_size $BS \
  --per_device_eval_batch_size $BS \
  --learning_rate 1e-4 \
  --num_train_epochs 3 \
  --max_source_length 128 --max_target_length 64 \
  --gradient_checkpointing \
  --predict_with_generate \
  --save_strategy epoch \
  --output_dir out/t5-11b-multitask
