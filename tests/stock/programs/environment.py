"""Print the variables and arguments that the launcher handed over. Imports no library, so that it starts at once."""

import json
import os
import sys

NAMES = ("ACCELERATE_", "FSDP_", "MPGUARD_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
handed = {name: value for name, value in os.environ.items() if name.startswith(NAMES)}
line = {"rank": int(os.environ.get("RANK", "0")), "environment": handed, "arguments": sys.argv[1:]}
sys.stdout.write(json.dumps(line) + "\n")
