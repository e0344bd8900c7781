import sys
from ast import literal_eval

for arg in sys.argv[1:]:
    if "=" not in arg:
        with open(arg) as f:
            exec(f.read())
    else:
        key, val = arg[2:].split("=")
        try:
            attempt = literal_eval(val)
        except (SyntaxError, ValueError):
            attempt = val
        assert key in globals(), f"Unknown config key: {key}"
        print(f"Overriding: {key} = {attempt}")
        globals()[key] = attempt
