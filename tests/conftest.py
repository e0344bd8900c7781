from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test keeps its findings to itself, outside of the folders that it looks at."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MPGUARD_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_colours_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain shell, also where CI sets them."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
