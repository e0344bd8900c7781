#!/bin/bash
mkdir -p checkpoints
python -u train.py --name raft-chairs --gpus 0 --num_steps 120000 --batch_size 8 --lr 0.00025 --image_size 368 496 --wdecay 0.0001 --mixed_precision
