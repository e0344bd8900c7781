#!/bin/bash
torchrun --nproc_per_node=8 train_stage2.py --aim-model AiM-B --vq-ckpt vq_f16.pt --dataset /data/imagenet --batch-size 128 --lr 4e-4
