#!/bin/bash
# V100, CUDA 12.2, llamafactory 0.8.4.dev0
CUDA_VISIBLE_DEVICES=0 llamafactory-cli train my_scripts/codes_lora_sft_mul_task.yaml
