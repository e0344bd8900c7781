from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from mpguard.lint import Diagnostic, Facts, Rule, any_of

#: Functions that read a config.
_READS = ("safe_load", "full_load", "load", "loads")
_READERS = ("yaml.", "toml.", "tomllib.", "omegaconf.")


class UnreadPrecisionKey(Rule, form_of="MPG518"):
    """A config has a key for the precision that no code of the project names.

    The run computes in another precision than the config says: slower, or with more memory, without a message.

    The file that reads the config must contain its name. Silent if code of the project may read keys without naming
    them: `**config`, `instantiate`, `setattr`, parsers that make classes of a config; and in a project with notebooks.
    """

    message = "`{key}` of {config} is read nowhere: the precision does not depend on it"
    help = "use the value, or remove the key"
    triggers = (any_of(b"yaml", b"toml", b"OmegaConf"), any_of(b"load"))
    triggers_nearby = (any_of(b".backward(", b"Trainer(", b".fit("),)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        calls = [call for name in _READS for call in facts.calls.get(name, ())]
        reads = [call for call in calls if facts.called_path(call).startswith(_READERS)]
        for config, key in facts.project.unread_keys(facts.path) if reads else ():
            yield self.at(reads[0], key=key, config=PurePath(config).name)
