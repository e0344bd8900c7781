#!/bin/bash
torchrun --nproc_per_node=2 trainer/diffusers_trainer.py \
  --model=hakurei/waifu-diffusion --run_name=wd-ft --dataset=/data/danbooru \
  --lr=5e-6 --epochs=10 --batch_size=4 --fp16=True --gradient_checkpointing=True
