"""Tests of several nodes on this machine (`make test-nodes`): they start two to four launchers each."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the real launchers run here")
