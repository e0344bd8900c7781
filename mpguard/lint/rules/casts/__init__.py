"""Rules about casts and dtypes (MPG1xx)."""
