"""Take the screenshots of the site: python docs/screenshots.py

docs/compare-light.png and docs/compare-dark.png, the first screen of docs/compare_example.html, with Chromium. What a
terminal shows is recorded as SVG instead (docs/record.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SIZE = "900,640"
#: Nothing is loaded from a network, and nothing is written outside of a new profile.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=4000",
)  # fmt: skip
#: The value of Chromium's setting for `prefers-color-scheme`.
SCHEMES = {"light": 1, "dark": 0}


def main() -> int:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("Chromium is not installed, which takes the screenshots (apt-get install chromium)")
    page = DOCS / "compare_example.html"
    for name, value in SCHEMES.items():
        with tempfile.TemporaryDirectory() as profile:
            command = [
                browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={SIZE}",
                f"--blink-settings=preferredColorScheme={value}",
                f"--screenshot={DOCS / f'compare-{name}.png'}", page.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
