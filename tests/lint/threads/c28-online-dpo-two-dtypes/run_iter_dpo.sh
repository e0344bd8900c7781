iter_num=1
model_path=Qwen/Qwen2.5-Math-7B
jsonl=data/iter${iter_num}/reward.json

cat <<EOT > dpo_config.yaml
run_name: iter${iter_num}
output_dir: iter${iter_num}
model_name_or_path: $model_path
ref_model: $model_path
learning_rate: 5.0e-7
num_train_epochs: 2
logging_steps: 2
gradient_checkpointing: true
do_train: true
do_eval: true
eval_steps: 10000
choose_type: max_min
train_dir: $jsonl
eval_dir: $jsonl
loss_type: sigmoid
lr_scheduler_type: cosine
max_length: 4096
max_prompt_length: 1000
eval_strategy: steps
bf16: true
per_device_train_batch_size: 1
per_device_eval_batch_size: 1
gradient_accumulation_steps: 16
report_to: none
EOT

accelerate launch --config_file ./configs/zero3.yaml run_dpo.py dpo_config.yaml
