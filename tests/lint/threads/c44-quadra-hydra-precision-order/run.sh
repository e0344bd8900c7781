python -m anomaly.main experiment=generic/mvtec/anomaly/padim trainer=lightning_gpu_fp16
