import sys
import tomllib
from types import SimpleNamespace


class SFTConfig(SimpleNamespace):
    pass


def _ns(d):
    return SFTConfig(**{k: _ns(v) if isinstance(v, dict) else v for k, v in d.items()})


def parse_argv():
    return _ns(tomllib.load(open(sys.argv[sys.argv.index("@") + 1], "rb")))
