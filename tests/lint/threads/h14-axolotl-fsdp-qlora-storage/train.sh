#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1
python -m axolotl.cli.preprocess qlora-fsdp.yml
accelerate launch --num_processes 2 -m axolotl.cli.train qlora-fsdp.yml
