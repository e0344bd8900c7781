"""Take the screenshots of the site: python docs/screenshots.py

The first screens of docs/compare_example.html and docs/sensitivity_example.html with Chromium, in light and dark: files
docs/compare-light.png and so on. What a terminal shows is recorded as SVG instead (docs/record.py). The pages are of
real runs: `benchmarks/compare_example.py`; `mpguard sensitivity --every 2 --html FILE` of examples/train_torch.py.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SIZE = "900,640"
PAGES = ("compare", "sensitivity")
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
    for page, (name, value) in itertools.product(PAGES, SCHEMES.items()):
        with tempfile.TemporaryDirectory() as profile:
            command = [
                browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={SIZE}",
                f"--blink-settings=preferredColorScheme={value}",
                f"--screenshot={DOCS / f'{page}-{name}.png'}", (DOCS / f"{page}_example.html").as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
