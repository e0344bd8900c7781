"""The language server: the findings of `mpguard lint` for the buffers of an editor."""
