"""`import mpguard.auto`: the policy that this process was handed, else `[tool.mpguard] recipe`, in force from here on.

The explicit form for a script that is started by `torchrun`, `deepspeed` or plain `python`: one line
at its top. Raises `ConfigError` where nothing says a policy.
"""

from __future__ import annotations

import os

from mpguard.runtime import activation, exit_hooks, guard
from mpguard.runtime.plan import CONFIG, Plan

if guard.current() is None:
    # A config's name alone (MPGUARD_CONFIG=mp.yaml torchrun ...) is enough.
    _config = None if Plan.from_environment() else os.environ.get(CONFIG) or None
    exit_hooks.ExitHooks(activation.start(Plan.found(_config))).take_over()
