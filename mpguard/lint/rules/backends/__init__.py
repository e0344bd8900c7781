"""Rules about TF32 and other switches of the backends (MPG7xx)."""
