"""Rules about code against the configs it is launched with (MPG86x)."""
