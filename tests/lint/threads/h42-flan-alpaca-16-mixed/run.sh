python training.py --output_dir outputs/model/xl \
  --model_name_or_path google/flan-t5-xl \
  --data_path data/train.json \
  --train_batch_size 1 --gradient_accumulation_steps 64 --use_gradient_checkpointing
