"""Words in names that say what something is for: one entry for each role that several facts and rules ask about.

A pattern is searched in a name. A string is the words of a role, for the patterns that add words of their own to it.
`tests/lint/facts/program/test_roles.py` has names of each role, and names that look like it.
"""

from __future__ import annotations

from mpguard.core.lazy_pattern import lazy_pattern

#: An optimizer, or a function that makes one.
OPTIMIZER = lazy_pattern("(?i)optim")
#: A criterion: `loss_fn`, `criterion`.
LOSSES = r"loss|loss_?fn|loss_?func(?:tion)?|criterion"
#: A flag or a function that asks for an overflow.
OVERFLOWS = r"finite|inf(?![a-z])|nan(?![a-z])|overflow"
#: A function that stores, restores, prints or tests what it gets, and does not train with it.
HANDLES_STATE = r"save|load|checkpoint|ckpt|restore|resume|print|log|info|isinstance|hasattr|bool"
