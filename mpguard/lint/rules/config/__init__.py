"""Rules about config files (MPG8xx)."""
