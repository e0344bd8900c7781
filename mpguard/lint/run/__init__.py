"""Running the linter: engine, readers, prefilter, rules, workers, time limits, fixes, cache, adoption."""
