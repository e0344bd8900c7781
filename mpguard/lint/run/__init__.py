"""Running the linter: the engine and its readers, the prefilter, rules, workers, time limits, fixes, cache, adoption."""
