#!/bin/bash
torchrun --nproc_per_node=8 train_fsdp.py --parallel fsdp --amp --data /data/imagenet/train
