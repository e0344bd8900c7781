from __future__ import annotations

from mpguard.lint import Bad, EngineRule, Good


class UnreadableConfig(EngineRule):
    """A YAML or JSON config does not parse, or means something else than it says.

    ## Why is this bad
    A config that does not parse stops the launch; that is the harmless case. A key that is there twice
    does not: accelerate and DeepSpeed take the last one, in silence, and the first one is what people
    read. Tags (`!!python/...`) are refused by accelerate; mpguard never executes them.

    ## Known limits
    A YAML or JSON that is found in a folder is a config if it has the keys of one (of accelerate,
    DeepSpeed or axolotl), or, where it does not parse, lines that look like them. Others are none of
    mpguard's business, unless they are named on the command line.
    """

    code, name = "MPG003", "unreadable-config"
    severity = "error"
    message = "{problem}"
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_processes: 1
mixed_precision: fp16  # !
""",
            name="mp.yaml",
        ),
        Bad(
            """\
{
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2},  # !
}
""",
            name="ds_config.json",
        ),
        Good(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_processes: 1
""",
            name="mp.yaml",
        ),
    )
