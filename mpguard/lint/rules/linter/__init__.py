"""What the engine itself reports about Python files and suppressions."""
