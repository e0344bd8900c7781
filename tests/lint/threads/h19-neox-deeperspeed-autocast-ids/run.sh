#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
cd gpt-neox
python ./deepy.py train.py ../configs/llama_debug.yml
