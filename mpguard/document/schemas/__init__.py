"""The keys that accelerate, DeepSpeed and axolotl read: committed tables, compared with the libraries by tests."""
