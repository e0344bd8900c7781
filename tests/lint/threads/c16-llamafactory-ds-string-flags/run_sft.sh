#!/bin/bash
train_CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
MODEL_PATH=/models/Meta-Llama-3-70B-Instruct
template=llama3
lora_output_dir=output/llama3-70b-lora
batch_size=1
save_steps=200

deepspeed --include localhost:$train_CUDA_VISIBLE_DEVICES --master_port 29501 src/train_bash.py \
    --stage sft \
    --deepspeed ds_config3.json \
    --save_only_model \
    --preprocessing_num_workers 16 \
    --model_name_or_path $MODEL_PATH \
    --do_train \
    --dataset tmp_train \
    --template $template \
    --finetuning_type lora \
    --lora_target all \
    --output_dir $lora_output_dir \
    --overwrite_cache \
    --overwrite_output_dir \
    --per_device_train_batch_size $batch_size \
    --gradient_accumulation_steps 2 \
    --flash_attn fa2 \
    --lr_scheduler_type cosine \
    --logging_steps 10 \
    --save_steps $save_steps \
    --cutoff_len 4096 \
    --learning_rate 1e-4 \
    --num_train_epochs 5.0 \
    --plot_loss \
    --bf16 \
    --group_by_length \
    --lora_alpha 16 \
    --lora_rank 8 \
    --lora_dropout 0.1
