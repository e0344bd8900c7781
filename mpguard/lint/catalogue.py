"""The codes of the published catalogue of rules, whether or not this version has a rule for each of them.

A suppression that names one is meant: another version of mpguard reports it.
"""

from __future__ import annotations

_RANGES = (
    (0, 3), (101, 111), (201, 217), (301, 310), (312, 313), (401, 417), (501, 507), (509, 515), (601, 606), (609, 609),
    (701, 704), (801, 815), (821, 828), (841, 844), (861, 866),
)  # fmt: skip

CODES = frozenset(f"MPG{number:03}" for first, last in _RANGES for number in range(first, last + 1))
