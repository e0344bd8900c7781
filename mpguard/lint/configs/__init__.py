"""Queries and edits of configs that config rules share. The tables of keys are in `mpguard.document.schemas`."""
