"""The targets of a policy: each has a plugin that turns the policy into settings and objects of a library.

These are the public names for the author of a plugin.
"""

from mpguard.targets.inject import Change, build, differences, inject
from mpguard.targets.plugin import STRATEGIES, Plugin, carriers, check_strategy, get, plugin, plugins
from mpguard.targets.settings import ABSENT, Setting, Settings, lookup, merged, show

__all__ = [
    "ABSENT",
    "STRATEGIES",
    "Change",
    "Plugin",
    "Setting",
    "Settings",
    "build",
    "carriers",
    "check_strategy",
    "differences",
    "get",
    "inject",
    "lookup",
    "merged",
    "plugin",
    "plugins",
    "show",
]
