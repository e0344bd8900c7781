"""Rules about what low precision does to numbers (MPG6xx)."""
