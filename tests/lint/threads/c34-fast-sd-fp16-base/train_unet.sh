Path_to_HuggingFace="user/my-merged-model"
SESSION_DIR=/content/gdrive/MyDrive/Fast-Dreambooth/Sessions/elinckus

cd /content && rm -rf stable-diffusion-custom
git clone --depth 1 https://huggingface.co/$Path_to_HuggingFace stable-diffusion-custom

accelerate launch /content/diffusers/examples/dreambooth/train_dreambooth.py \
  --image_captions_filename \
  --train_only_unet \
  --pretrained_model_name_or_path=/content/stable-diffusion-custom \
  --instance_data_dir="$SESSION_DIR/instance_images" \
  --output_dir="/content/models/elinckus" \
  --seed=332323 \
  --resolution=512 \
  --mixed_precision=fp16 \
  --train_batch_size=1 \
  --gradient_accumulation_steps=1 \
  --use_8bit_adam \
  --learning_rate=2e-6 \
  --lr_scheduler="polynomial" \
  --lr_warmup_steps=0 \
  --max_train_steps=2100
