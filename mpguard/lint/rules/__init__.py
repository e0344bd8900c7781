"""Rules about Python code: one file each, in folders per group."""
