"""The language server: what `mpguard lint` reports, in an editor, about what is in its buffers."""
