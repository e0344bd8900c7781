"""Taking the linter up in an old project: baselines, changed lines, comments that suppress what there is."""
