from __future__ import annotations

from mpguard.lint import Bad, EngineRule, Good


class UnreadableConfig(EngineRule):
    """A YAML or JSON config does not parse, or its meaning differs from what is written.

    ## Why is this bad
    A config that does not parse stops the launch; that is the harmless case. A duplicate key does not: YAML
    readers silently take the last one, while people read the first one. accelerate refuses tags (`!!python/...`);
    mpguard never executes them.

    ## Known limits
    A YAML or JSON file that is found in a folder is a config if it has the keys of one (of accelerate, DeepSpeed or
    axolotl), or, if it does not parse, lines that resemble them. Other files are ignored unless they are named on the
    command line. In YAML of another program than accelerate, a key that is there twice is reported only if its name has
    to do with precision; DeepSpeed's config is JSON whatever the name of the file is.

    DeepSpeed reads its JSON with hjson, which accepts comments, a comma before a bracket, and lines without a comma
    between them; Trainer, accelerate and Lightning use `json`, which does not. They are reported unless nothing in the
    project reads configs with `json`, or all commands that name the file give it to `--deepspeed_config`.
    """

    code, name = "MPG003", "unreadable-config"
    severity = "error"
    message = "{problem}"
    help = "correct it at this place: what the launcher reads differs from what is written"
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
        Good(
            """\
base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 2
bf16: true
micro_batch_size: 4
""",
            name="finetune.yaml",
        ),
    )
