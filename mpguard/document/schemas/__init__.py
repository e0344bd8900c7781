"""The keys that accelerate, DeepSpeed, axolotl and LLaMA-Factory read: committed tables, compared by tests."""
