"""Rules about config files: one file each."""
