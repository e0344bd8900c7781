"""The data model of the linter: rules, findings, results, selection, suppressions, and the pages of rules."""
