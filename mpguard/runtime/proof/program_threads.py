"""Several threads of a program that train at the same time, each its own models.

What another thread changes at any time must not be read: autograd sets gradients without Python's lock, and a read at
that moment ends the process.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

#: Held while gradients of several optimizers are read, and while a recording starts or ends: no other thread's pass or
#: step begins then.
reading = threading.RLock()

#: The thread that has created an optimizer, or stepped it last.
_of_optimizer: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def is_another(thread: int) -> bool:
    """True if the current thread is another one of the program. thread: the identifier of one.

    Autograd runs passes in threads of its own, within a pass: they are not the program's.
    """
    here = threading.current_thread()
    return here.ident != thread and not isinstance(here, threading._DummyThread)


def uses(optimizer: Any) -> None:
    """Record that this thread has created an optimizer, or steps it; not one of autograd's, in a hook of a pass."""
    own = threading.get_ident()
    if isinstance(threading.current_thread(), threading._DummyThread):
        return
    with contextlib.suppress(TypeError):  # there is no weak reference to it
        if _of_optimizer.get(optimizer) != own:
            with reading:
                _of_optimizer[optimizer] = own


def is_used_elsewhere(optimizer: Any) -> bool:
    """True if another thread has created an optimizer, or stepped it last."""
    own = threading.get_ident()
    with contextlib.suppress(TypeError):
        return _of_optimizer.get(optimizer, own) != own
    return False
