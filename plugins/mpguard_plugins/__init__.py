"""mpguard for its targets: one plugin a file."""
