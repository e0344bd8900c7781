"""Tune: run a script under each precision that may be faster, and find the fastest one that is proven.

    candidates   `TABLE`: what is tried, as fields of the policy
    request      `plan`: which candidates can run here; `tune`: measure them
    search       which candidate is measured when: interleaved rounds with fewer and fewer candidates
    trial        one run of the script, in processes of its own; its result
    start        what these processes run: `mpguard launch` with some fields of the policy changed
    model        step times with intervals, losses, the winner, JSON
    write        the winner in mp.yaml

What is measured in the workers is in `mpguard.runtime.meter`. Importing this package imports nothing else.
"""
