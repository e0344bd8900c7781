#!/bin/bash
export CUDA_VISIBLE_DEVICES=0
nohup python src/train_bash.py \
    --stage pt \
    --model_name_or_path /home/hl/base-model/llama-2-7b-hf/ \
    --do_train \
    --dataset a3gpp11md,a3gpp13md,a3gpp14md,a3gpp15md \
    --dataset_dir data \
    --finetuning_type lora \
    --lora_target q_proj,v_proj \
    --lora_rank 8 \
    --cutoff_len 1024 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --lr_scheduler_type cosine \
    --learning_rate 5e-5 \
    --num_train_epochs 3.0 \
    --logging_steps 10 \
    --save_steps 1000 \
    --output_dir /home/hl/output/llama2-3gpp \
    --plot_loss &> 3gpp.out &
