"""Where the repository keeps what tests read."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
PROGRAMS = TESTS / "programs"
