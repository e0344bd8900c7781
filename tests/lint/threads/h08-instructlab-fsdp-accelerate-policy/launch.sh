#!/bin/bash
torchrun --nnodes=1 --nproc_per_node=8 -m instructlab_training.main_ds \
  --model_name_or_path=instructlab/granite-7b-lab \
  --data_path=data/data.jsonl --output_dir=ckpt \
  --num_epochs=7 --batch_size=8 --learning_rate=2e-5 \
  --fsdp_sharding_strategy=SHARD_GRAD_OP
