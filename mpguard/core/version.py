"""The version of mpguard."""

__version__ = "0.1.0"
