from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test keeps its findings to itself, outside of the folders that it looks at."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MPGUARD_CACHE_DIR", str(folder))
    return folder
