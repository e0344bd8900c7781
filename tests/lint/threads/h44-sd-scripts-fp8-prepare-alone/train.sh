accelerate launch --config_file accelerate_fp8.yaml flux_train_network.py \
  --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev --train_data_dir cache/style \
  --output_dir output/style --gradient_checkpointing --max_train_steps 1600
