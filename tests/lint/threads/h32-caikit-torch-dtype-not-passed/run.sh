python examples/run_fine_tuning.py --dataset "billsum" --model_name tiiuae/falcon-rw-1b --num_epochs 1 \
  --output_dir tmp/falcon-1b --batch_size=4 --accumulate_steps 8 --max_source_length 16 --max_target_length 16 \
  --torch_dtype bfloat16
