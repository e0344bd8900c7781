"""Findings of earlier runs, for files whose findings rest on nothing that has changed.

`store`: the file that they are kept in. `again`: whether what was seen then is what is there now. `identity`: what
all findings of a run rest on: mpguard's own code, rules of others, versions.
"""
