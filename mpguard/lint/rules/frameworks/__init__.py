"""Rules about Accelerate, DeepSpeed, FSDP, Trainers and Lightning (MPG5xx)."""
