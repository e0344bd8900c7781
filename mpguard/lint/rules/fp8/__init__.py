"""Rules about FP8 (MPG4xx)."""
