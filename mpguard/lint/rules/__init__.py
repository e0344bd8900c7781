"""The rules: one file each, in a folder per group; those about config files are in `config`."""
