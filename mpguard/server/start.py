"""Starts the server on stdin and stdout, and ends it."""

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

#: Seconds for a check that is under way when the editor leaves.
PATIENCE = 0.5


def start(isolated: bool) -> int:
    """Serves one editor until it says `exit` or is gone; returns the exit status that the protocol asks for."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a rule prints is for the log, and would break the protocol
    sys.stdout = sys.stderr
    jobs = Jobs()
    with settings.isolated(isolated), tracked_fs.recording():
        try:
            found, trouble = rules(), None
        except ExtensionError as error:
            found, trouble = rules(own_only=True), error
        server = Session(Checker(found), jobs, trouble)
        register(server)

        def serve() -> None:
            try:
                server.start_io(incoming, outgoing)
            finally:
                jobs.end()
                if not jobs.ended.wait(PATIENCE):  # a check is under way, which nobody waits for any more
                    sys.stderr.flush()
                    os._exit(_status(server))

        threading.Thread(target=serve, daemon=True).start()
        for module in ("mpguard.lint.facts.file", "mpguard.lint.facts.domain.config_dicts"):
            importlib.import_module(module)  # while the editor makes itself known: the first check is fast then
        # Trees are many objects and little garbage, which `jobs` collects in pauses; what is loaded by now stays.
        gc.freeze()
        gc.set_threshold(200_000, 50, 100)
        try:
            jobs.run()
        except KeyboardInterrupt:  # the other thread waits for a line of the terminal, and cannot be woken
            sys.stderr.flush()
            os._exit(130)
    return _status(server)


def _status(server: Session) -> int:
    """What the protocol asks for: 0 where the editor said that it would leave."""
    return 0 if server.protocol._shutdown else 1
