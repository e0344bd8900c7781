from datasets import load_dataset

from sae_training.activations import activation_stream
from sae_training.sae import SAEConfig, TopKSAE
from sae_training.sae_trainer import SAETrainer, SAETrainerConfig

sae_cfg = SAEConfig(d_in=768, d_sae=24576, k=64, dtype="bfloat16")
cfg = SAETrainerConfig(autocast=True)

texts = load_dataset("NeelNanda/pile-10k", split="train")["text"]
stream = activation_stream("gpt2", texts, layer=8, batch_size=cfg.train_batch_size)
SAETrainer(cfg, TopKSAE(sae_cfg), stream).fit()
