"""`import mpguard.auto` puts a policy in force: the one that the launcher handed over, else `[tool.mpguard] recipe`.

For a script that is started by `torchrun`, `deepspeed` or plain `python`: one line at its top. Raises
`ConfigError` if no policy is defined.
"""

from __future__ import annotations

import os

from mpguard.runtime import activation, exit_hooks, guard
from mpguard.runtime.plan import CONFIG, Plan
from mpguard.watching import api

if guard.current() is None:
    # MPGUARD_CONFIG alone is enough: `MPGUARD_CONFIG=mp.yaml torchrun ...`.
    _config = None if Plan.from_environment() else os.environ.get(CONFIG) or None
    _plan = Plan.resolve(_config)
    exit_hooks.ExitHooks(activation.start(_plan, launched=False)).install()
    api.start(_plan)
