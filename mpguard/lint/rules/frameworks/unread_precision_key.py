from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from mpguard.lint import Bad, Diagnostic, Facts, Good, Rule, any_of

#: Functions that read a config.
_READS = ("safe_load", "full_load", "load", "loads")
_READERS = ("yaml.", "toml.", "tomllib.", "omegaconf.")


class UnreadPrecisionKey(Rule):
    """A config has a key for the precision that no code of the project names.

    ## What it does
    Reports the call that reads a YAML or TOML (`yaml.safe_load`, `OmegaConf.load`, ...) which has such a key
    (`mixed_precision: bf16`, `float32_matmul_precision: high`, `amp: true`), if the word is in no Python file of the
    project.

    ## Why is this bad
    The run computes in another precision than the config says: slower, or with more memory, without a message.

    ## Known limits
    The file that reads the config must contain its name. Silent if code of the project may read keys
    without naming them: `**config`, `instantiate`, `setattr`, parsers that make classes of a config; and in a project
    with notebooks.
    """

    code, name = "MPG521", "unread-precision-key"
    severity = "warning"
    message = "`{key}` of {config} is read nowhere: the precision does not depend on it"
    help = "use the value, or remove the key"
    triggers = (any_of(b"yaml", b"toml", b"OmegaConf"), any_of(b"load"))
    triggers_nearby = (any_of(b".backward(", b"Trainer(", b".fit("),)
    examples = (
        Bad(
            """\
import argparse

import yaml
from loop import train

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="config.yaml")
args = parser.parse_args()
with open(args.config) as file:
    config = yaml.safe_load(file)  # !
train(config["train"], build(**config["model"]), data())
""",
            files={
                "pyproject.toml": "",
                "loop.py": """\
import torch

def train(config, model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
""",
                "config.yaml": """\
train:
  float32_matmul_precision: "high"
  learning_rate: 1
model:
  dim: 8
""",
            },
        ),
        Good(
            """\
import torch
import yaml
from loop import train

config = yaml.safe_load(open("config.yaml"))
torch.set_float32_matmul_precision(config["float32_matmul_precision"])
train(config, build(), data())
""",
            files={
                "pyproject.toml": "",
                "loop.py": """\
import torch

def train(config, model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
""",
                "config.yaml": """\
float32_matmul_precision: "high"
learning_rate: 1.0e-4
""",
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        calls = [call for name in _READS for call in facts.calls.get(name, ())]
        reads = [call for call in calls if facts.called_path(call).startswith(_READERS)]
        for config, key in facts.project.unread_keys(facts.path) if reads else ():
            yield self.at(reads[0], key=key, config=PurePath(config).name)
