torchrun --nproc_per_node=8 train.py \
  --dataset_path data/imagenet/train --output_dir out/aim-b \
  --per_device_train_batch_size 128 --learning_rate 4e-4 --weight_decay 0.05 \
  --adam_beta2 0.95 --num_train_epochs 300 --lr_scheduler_type cosine --warmup_steps 5000 \
  --bf16 True --remove_unused_columns False --dataloader_num_workers 8 --save_steps 5000 --logging_steps 50 \
  --report_to none
