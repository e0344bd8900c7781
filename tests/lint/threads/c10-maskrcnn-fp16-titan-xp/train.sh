#!/bin/bash
#SBATCH --job-name=safe
#SBATCH --gres=gpu:titan_xp:8
#SBATCH --ntasks=1

CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 torchrun \
  --nproc_per_node=8 \
  ./train_net.py \
  --config-file "configs/safe_0812.yaml" \
  DTYPE "float16"
