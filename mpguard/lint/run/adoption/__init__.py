"""Adopting the linter in an existing project: baselines, changed lines, comments that suppress present findings."""
