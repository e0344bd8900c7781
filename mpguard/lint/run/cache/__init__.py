"""Findings of earlier runs, for files of which no dependency has changed.

`store`: the file with the findings. `dependencies`: compares what a check has read with what is there now. `identity`:
the dependencies of all findings of a run: mpguard's own code, the rules of other packages, versions.
"""
