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
        Bad(
            """\
{
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2},  # !
}
""",
            name="ds_config.json",
        ),
        Bad(
            """\
base_model: meta-llama/Llama-3.2-1B
bf16: true
micro_batch_size: 2
bf16: false  # !
""",
            name="finetune.yaml",
        ),
        Bad(
            """{
  "zero_optimization": {
    "stage": 3,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_prefetch_bucket_size": 5e8  # !
  }
}
""",
            name="zero3.yaml",
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
        Good(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_processes: 1
""",
            name="mp.yaml",
        ),
        Good(
            """\
{
  // read by deepspeed.initialize alone
  "bf16": {"enabled": true}
  "zero_optimization": {"stage": 2},
}
""",
            name="ds_config.json",
            files={
                "pyproject.toml": "[project]\nname = 'translate'\n",
                "translate.py": """\
import deepspeed

engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
""",
            },
        ),
        # A command gives it to DeepSpeed itself; other programs of the project use a Trainer.
        Good(
            '{\n"bf16": {"enabled": true},\n"zero_optimization": {"stage": 2},\n}\n',
            name="ds_config.json",
            files={
                "pyproject.toml": "[project]\nname = 'translate'\n",
                "run.sh": "deepspeed main.py --deepspeed --deepspeed_config ds_config.json\n",
                "other.py": "from transformers import Trainer, TrainingArguments\n",
            },
        ),
        Bad(
            '{\n"bf16": {"enabled": true},\n"zero_optimization": {"stage": 2},  # !\n}\n',
            name="ds_config.json",
            files={
                "pyproject.toml": "[project]\nname = 'translate'\n",
                "run.sh": "deepspeed main.py --deepspeed ds_config.json\n",
                "main.py": "from transformers import Trainer, TrainingArguments\n",
            },
        ),
        Bad(
            '{\n"bf16": {"enabled": true},\n"zero_optimization": {"stage": 2},  # !\n}\n',
            name="ds_config.json",
            files={
                "pyproject.toml": "[project]\nname = 'translate'\n",
                "run.sh": "accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json main.py\n",
            },
        ),
        Bad(
            '{\n"bf16": {"enabled": true},\n"zero_optimization": {"stage": 2},  # !\n}\n',
            name="ds_config.json",
            files={
                "pyproject.toml": "[project]\nname = 'translate'\n",
                "run.sh": "deepspeed main.py --deepspeed_config ds_config.json\n",
                "main.py": "import json\n\nconfig = json.load(open(args.deepspeed_config))\n",
            },
        ),
    )
