"""`python -m mpguard.tune.start OVERRIDES ARGUMENTS`: `mpguard launch ARGUMENTS` with fields of the policy changed.

`mpguard tune` starts each trial with it. OVERRIDES: a JSON object, field -> value.
"""

from __future__ import annotations

import json
import sys

from mpguard.core.console import print_line
from mpguard.core.errors import MpguardError, NotInForce
from mpguard.runtime import meter
from mpguard.runtime.launch import launcher
from mpguard.runtime.messages import failure_message

#: The place of the launcher's refusal, see `meter.write_refusal`.
LAUNCHER = "launcher"


def main(words: list[str]) -> int:
    """Launch the run, and return its exit status: 1 if it is refused, 2 if it cannot start, else the script's."""
    try:
        return launcher.run(words[1:], json.loads(words[0]))
    except NotInForce as error:
        print_line(f"mpguard: {failure_message(error)}")
        meter.write_refusal(error.reasons, LAUNCHER)
        return 1
    except MpguardError as error:
        print_line(f"mpguard: {error}")
        meter.write_refusal(str(error), LAUNCHER)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
