from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mpguard.lint import (
    Bad,
    Diagnostic,
    Edit,
    Fix,
    LaunchRule,
    Note,
    any_of,
    errors,
    launch_lines,
    lazy_pattern,
    siblings,
    tracked_fs,
)

_OPTIONS = ("--config", "--config_file", "--config-file")
#: Names of launch configs that do not exist yet: mpguard's own (`mpguard init` writes it) and accelerate's.
_LAUNCH_CONFIG = lazy_pattern(r"(?:^|/)(?:mp|[\w-]*accelerate[\w-]*)\.ya?ml$")


class ConfigAfterScript(LaunchRule):
    """In an `accelerate launch` line, the launch config is after the script and becomes an argument of the script.

    ## What it does
    Reads the launch lines of shell scripts, Makefiles, GitHub workflows and READMEs, and checks the value of the option
    `--config` (or `--config_file`) after the script: it is reported if the file is an accelerate config by its content,
    or, if it does not exist, has the name of one (`mp.yaml`, `accelerate_config.yaml`).

    ## Why is this bad
    All arguments after the script are the script's. The launcher runs without the config: with one process or all GPUs,
    in FP32, or with what `accelerate config` once wrote to the home folder. A script that ignores unknown arguments
    does not even report it (accelerate 1.15.0).

    ## Fix safety
    Safe: the config moves to where `accelerate launch` reads it, as `--config_file`; stock accelerate refuses
    `--config`. The script loses an argument that was not meant for it.

    ## Known limits
    A line is not reported if its config does not exist and has no such name, if the name contains a variable, if the
    line has a config before the script too, or if the config does not exist while the script has an option of that
    name.
    """

    code, name = "MPG866", "config-after-script"
    severity = "error"
    message = "`{option}` is after the script `{script}`: {launcher} runs without {config}"
    help = "put it before the script, as `--config_file`"
    triggers = (any_of(b"accelerate"), any_of(b"--config"))
    examples = (
        Bad(
            """\
#!/bin/sh
accelerate launch train.py --config mp.yaml --lr 1e-4  # !
CUDA_VISIBLE_DEVICES=0,1 accelerate launch \\
    --num_processes 2 \\
    train.py \\
    --config_file=configs/fsdp.yaml \\  # !
    --lr 1e-4
""",
            name="run.sh",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n",
                   "configs/fsdp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"},
            fixed="""\
#!/bin/sh
accelerate launch --config_file mp.yaml train.py --lr 1e-4
CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file configs/fsdp.yaml \\
    --num_processes 2 \\
    train.py \\
    --lr 1e-4
""",
        ),
    )  # fmt: skip

    def check(self, launches: list[launch_lines.Launch]) -> Iterator[Diagnostic]:
        for launch in launches:
            if launch.launcher != "accelerate" or launch.hidden or launch.script is None:
                continue
            found = launch.argument(*_OPTIONS)
            if found is None or "config_file" in launch.options:
                continue
            option, value = found
            name = (option.text or "").partition("=")[0]
            if value.text is None or not self._is_launch_config(value.text, name, launch):
                continue
            span = (option.span[0], value.span[1])
            yield self.at(
                span,
                option=name,
                script=launch.script.text or "",
                launcher="accelerate launch",
                config=value.text,
                fix=Fix("Put it before the script", "safe", self._moved(launch, option, value)),
                notes=(Note("the script; what follows are its own arguments", launch.script.span),),
            )

    def _is_launch_config(self, name: str, option: str, launch: launch_lines.Launch) -> bool:
        if not name.endswith((".yaml", ".yml", ".json")):
            return False
        path = self.project.named_in(name, launch.path)
        if path is None:
            return _LAUNCH_CONFIG.search(name) is not None and not self._is_scripts(option, launch)
        return _is_accelerates(path)

    def _is_scripts(self, option: str, launch: launch_lines.Launch) -> bool:
        """True if the script is in the tree and has an option of that name."""
        name = launch.script.text if launch.script is not None else None
        script = self.project.named_in(name, launch.path) if name else None
        try:
            return script is not None and option.encode() in tracked_fs.read(script)
        except OSError:
            return False

    def _moved(
        self, launch: launch_lines.Launch, option: launch_lines.Word, value: launch_lines.Word
    ) -> tuple[Edit, ...]:
        before = [launch.script, *launch.arguments]
        place = before.index(option)
        previous = before[place - 1]
        assert previous is not None and value.text is not None
        name = value.text if re.fullmatch(r"[\w./@%+=:,-]+", value.text) else f"'{value.text}'"
        return (
            Edit(launch.start, launch.start, f" --config_file {name}"),
            Edit(previous.span[1], value.span[1], ""),
        )


def _is_accelerates(path: Path) -> bool:
    from mpguard.lint import document

    try:
        return (tracked_fs.size(path) or 0) <= siblings.LARGEST_CONFIG and document.read(path).kind == "accelerate"
    except (OSError, errors.ConfigError):
        return False
