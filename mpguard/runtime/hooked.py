"""Compatibility: the hook line that earlier versions wrote imports this module instead of `launch.startup_hook`.

Without it, that line would do nothing (it ignores `ImportError`), and `accelerate launch --config_file mp.yaml` would
run without the policy. Remove this module when no such line can be installed any more.
"""

import sys

from mpguard.runtime.launch import startup_hook

if startup_hook.launch_arguments(sys.orig_argv) is not None:
    from mpguard.core.console import print_line

    print_line("mpguard: the installed hook is of an earlier version. Run `mpguard hook install` to replace it")
