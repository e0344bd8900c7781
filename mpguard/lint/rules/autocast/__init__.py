"""Rules about autocast (MPG3xx)."""
