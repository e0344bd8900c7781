"""mpguard's own plugins, one target per file."""
