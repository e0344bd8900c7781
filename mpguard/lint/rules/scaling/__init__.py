"""Rules about loss scaling (MPG2xx)."""
