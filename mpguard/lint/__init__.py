"""The linter: reads training code and configs before a GPU is rented. Imports no torch."""
