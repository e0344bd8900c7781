"""`python -m mpguard` is the same as `mpguard`."""

import sys

from mpguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
