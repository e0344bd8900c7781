"""`python -m mpguard.run [--config mp.yaml] SCRIPT [ARGS]`: run a script with the policy in force and proven.

    accelerate launch --config_file mp.yaml -m mpguard.run --config mp.yaml train.py --lr 3
    torchrun --nproc_per_node 2 -m mpguard.run --config mp.yaml train.py --lr 3

The policy is that of --config, else the one in MPGUARD_POLICY, else `[tool.mpguard] recipe`.
Exit status: the script's; 1 not in force, 2 could not start (both with a `mpguard:` line on stderr).
"""

from mpguard.runtime.launch.worker import main, run_and_exit

__all__ = ["main"]

if __name__ == "__main__":
    run_and_exit()
