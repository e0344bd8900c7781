"""Start the server on stdin and stdout, and end it."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import ExtensionError
from mpguard.lint.model.rule import rules
from mpguard.server.checker import Checker
from mpguard.server.features import register
from mpguard.server.jobs import Jobs
from mpguard.server.session import Session

#: Seconds that a running check gets to finish when the editor disconnects.
GRACE_PERIOD = 0.5


def start(isolated: bool) -> int:
    """Serve one editor until it sends `exit` or disconnects; return the exit status that the protocol requires."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a rule goes to the log; on stdout it would break the protocol
    sys.stdout = sys.stderr
    jobs = Jobs()
    with settings.isolated(isolated), tracked_fs.recording():
        try:
            loaded, startup_error = rules(), None
        except ExtensionError as error:
            loaded, startup_error = rules(own_only=True), error
        server = Session(Checker(loaded), jobs, startup_error)
        register(server)

        def serve() -> None:
            try:
                server.start_io(incoming, outgoing)
            finally:
                jobs.stop()
                if not jobs.stopped.wait(GRACE_PERIOD):  # a check is still running, and its result is no longer needed
                    sys.stderr.flush()
                    os._exit(_status(server))

        threading.Thread(target=serve, daemon=True).start()
        for module in ("mpguard.lint.facts.file", "mpguard.lint.facts.domain.config_dicts"):
            importlib.import_module(module)  # during the editor's handshake, so that the first check is fast
        # Syntax trees are many objects and little garbage, which `jobs` collects in pauses. What is loaded now stays.
        gc.freeze()
        gc.set_threshold(200_000, 50, 100)
        try:
            jobs.run()
        except KeyboardInterrupt:  # the other thread blocks on reading the terminal, and cannot be interrupted
            sys.stderr.flush()
            os._exit(130)
    return _status(server)


def _status(server: Session) -> int:
    """Return the exit status that the protocol requires: 0 if the editor sent `shutdown` before."""
    return 0 if server.protocol._shutdown else 1
