"""Write an mp.yaml from a recipe: a complete, commented accelerate config.

DeepSpeed strategies also get a ds_config.json in the same folder. The precision is written only
there, because accelerate rejects `mixed_precision` next to a DeepSpeed config file. On a machine
without a GPU, `single` and `ddp` are written for the CPU unless --device gpu is given.

Without RECIPE it asks for GPU, model, framework and wish, and explains what it recommends, by what
works here (`mpguard doctor`) and what fits (`mpguard estimate`); --yes asks nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from mpguard import targets
from mpguard.core.console import write_lines
from mpguard.core.errors import ConfigError, PolicyError
from mpguard.core.text_edits import apply_edits, write_atomically
from mpguard.document import Document, mp_yaml, parse
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import AUTO, auto_on
from mpguard.policy.recipes import recipe as named
from mpguard.targets import capabilities
from mpguard.targets.plugin import STRATEGIES
from mpguard.targets.settings import ABSENT, show

DISTRIBUTED_TYPE = {"single": "'NO'", "ddp": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}

FSDP = {
    "fsdp1": """\
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP # the model's _no_split_modules, or the classes named here:
  # fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
  fsdp_sync_module_states: true
  fsdp_cpu_ram_efficient_loading: {efficient}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_offload_params: false
  fsdp_activation_checkpointing: false
""",
    "fsdp2": """\
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP # the model's _no_split_modules, or the classes named here:
  # fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_cpu_ram_efficient_loading: {efficient}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_offload_params: false
  fsdp_activation_checkpointing: false
""",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="name of a recipe (see `mpguard recipes`); without one, init asks"
    )
    parser.add_argument("--yes", action="store_true", help="without RECIPE: ask nothing, take what is recommended here")
    parser.add_argument("--model", metavar="MODEL", help="without RECIPE: the model, for an estimate of what fits")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        metavar="STRATEGY",
        help=f"{', '.join(STRATEGIES)}; default: ddp if there are several GPUs, else single",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("mp.yaml"),
        metavar="FILE",
        help="the file to write (default: mp.yaml)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    parser.add_argument(
        "--num-processes",
        type=_positive,
        metavar="N",
        help="default: 1 for `single`; else one per GPU (2 without a GPU; at least 2 for ddp)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        metavar="N",
        help='the batch size of each process in DeepSpeed\'s JSON (default: "auto", which the Trainer and accelerate '
        "fill in; a script that calls deepspeed.initialize needs a number)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="the device to train on (default: what this machine has); gpu also writes for GPUs of another machine",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


@dataclasses.dataclass(frozen=True)
class InitPlan:
    """What to write. recipe: its name; policy: what it is here; device: `cpu` or `gpu`; output: the YAML.

    batch_size: of each process, for DeepSpeed's JSON; None for "auto", which the Trainer and accelerate fill in.
    """

    recipe: str
    policy: Policy
    strategy: str
    device: str
    processes: int
    output: Path
    batch_size: int | None = None

    @property
    def stage(self) -> int | None:
        """Return the ZeRO stage; None without DeepSpeed."""
        return int(self.strategy[-1]) if self.strategy.startswith("deepspeed") else None

    @property
    def at_launch(self) -> bool:
        """True for `auto`: the launch decides, by its own hardware, so no file has a precision."""
        return self.recipe == mp_yaml.AUTO_RECIPE

    @property
    def deepspeed_config(self) -> Path | None:
        """Return the path of DeepSpeed's JSON; None if it would set nothing, so that the YAML is enough."""
        if self.stage is None or self.at_launch:
            return None
        settings = targets.get("deepspeed").settings(self.policy, self.strategy)
        on = any(setting.value not in (ABSENT, False) for setting in settings.values())
        return self.output.with_name("ds_config.json") if on else None


def run(options: argparse.Namespace) -> int:
    if str(options.output) == "-":
        raise ConfigError("-o -: init cannot write to stdout, as some strategies need two files; a file name is needed")
    reasons: list[str] = []
    if options.recipe is None:
        from mpguard.cli import init_questions

        reasons = init_questions.fill(options)
    recipe, policy = options.recipe.replace("-", "_"), named(options.recipe)
    here = hardware.detect()
    strategy = options.strategy or ("ddp" if here.gpus > 1 and options.device != "cpu" else "single")
    device = options.device or _device(policy, strategy, here)
    if recipe == mp_yaml.AUTO_RECIPE:
        policy = auto_on(here.cpu if device == "cpu" else here)
    notes = reasons + _check_machine(policy, strategy, device, here, elsewhere=options.device == "gpu")
    processes = options.num_processes or _processes(strategy, device, here)
    if strategy == "single" and processes > 1:
        raise ConfigError(
            f"--num-processes {processes}: strategy `single` runs one process. Add --strategy ddp, fsdp2 or another one"
        )
    plan = InitPlan(recipe, policy, strategy, device, processes, options.output, options.batch_size)
    if options.batch_size is not None and plan.deepspeed_config is None:
        raise ConfigError(f"--batch-size {options.batch_size}: it is written for DeepSpeed only; remove it")
    files = _files(plan)
    _check_paths([Path(each.path) for each in files], options.force)
    for each in reversed(files):  # the YAML last, because it names the JSON
        try:
            write_atomically(Path(each.path), each.encoded(each.text))
        except OSError as error:
            raise ConfigError(f"{each.path}: cannot be written: {error.strerror or error}") from None
    if device == "gpu" and 0 < here.gpus < processes:
        notes.append(
            f"For {processes} processes, one per GPU; this machine has {here.gpus} GPU{'s' * (here.gpus > 1)}."
        )
    notes += _wish_notes(plan) + _unsupported_notes(plan)
    if policy.script_requirements and plan.stage is None:
        notes.append(f"Note: {policy.script_requirements}.")
    if plan.deepspeed_config is not None:
        notes.append(_batch_note(plan))
    _print(plan, files, notes, options.format)
    return 0


def _batch_note(plan: InitPlan) -> str:
    """Return the note on the batch size in DeepSpeed's JSON: who fills it in, or must agree with it."""
    if plan.batch_size is None:
        return (
            f'The batch size in {plan.deepspeed_config} is "auto": the Trainer fills it in, and Accelerator.prepare '
            "from a DataLoader. A script that calls deepspeed.initialize itself needs a number: --batch-size N."
        )
    return (
        f"The Trainer stops if its batch size or gradient accumulation is another one than in {plan.deepspeed_config}: "
        f"{plan.batch_size} and 1."
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number; 1 or more is needed")
    return int(text)


def _device(policy: Policy, strategy: str, here: hardware.Hardware) -> str:
    on_cpu = here.gpu is None and strategy in ("single", "ddp") and here.cpu.refuses(policy) is None
    return "cpu" if on_cpu else "gpu"


def _check_machine(
    policy: Policy, strategy: str, device: str, here: hardware.Hardware, *, elsewhere: bool = False
) -> list[str]:
    """Return notes about the machine. Raise `MpguardError` if the recipe cannot run on the requested device.

    elsewhere: the user asks for GPUs that may not be the ones of this machine.
    """
    if device == "cpu":
        if strategy not in ("single", "ddp"):
            raise ConfigError(
                f"--device cpu with --strategy {strategy}: accelerate applies it on GPUs only. Use single or ddp"
            )
        if reason := here.cpu.refuses(policy):
            raise PolicyError(
                f"recipe `{policy.name}` cannot be applied on a CPU: it {reason.partition(' (')[0]}. Use bf16_mixed or "
                "fp32, or a GPU"
            )
        hint = ", as this machine has no GPU. --device gpu writes it for GPUs." if here.gpu is None else "."
        return [f"Written for the CPU{hint}"]
    if policy.name.startswith(AUTO):
        decides = "Written for GPUs: each launch decides by the GPU that it finds"
        return [f"{decides}, here {policy.name.removeprefix(AUTO)} ({hardware.best(here)[1]})."]
    if here.gpu is None:
        return ["Written for GPUs. This machine has none: the recipe was not checked, and cannot be launched here."]
    if here.capability is None:
        return [f"The compute capability of {here.gpu} could not be read: the recipe was not checked."]
    reason = here.refuses(policy)
    if reason is not None and elsewhere:
        rehearsal = ". `mpguard launch --emulate` rehearses it here" if _can_be_emulated(policy) else ""
        return [f"Written for other GPUs. The recipe cannot run here ({here}): {reason}{rehearsal}."]
    if reason is not None:
        raise PolicyError(
            f"recipe `{policy.name}` cannot run here ({here}): {reason}. `mpguard recipes` lists those that can, and "
            "--device gpu writes the file for other GPUs"
        )
    return [f"Checked: the recipe runs on {here}."]


def _can_be_emulated(policy: Policy) -> bool:
    try:
        policy.emulated()
    except PolicyError:
        return False
    return True


def _wish_notes(plan: InitPlan) -> list[str]:
    """Return notes on the wishes of a recipe: what the run goes without, or what the optimizer must be."""
    left_out = capabilities.left_out_at_start(plan.policy, plan.strategy, plan.processes)
    notes = [
        f"{field} of the recipe is off: {reason}. {capabilities.SAME_PRODUCTS}." for field, reason in left_out.items()
    ]
    if plan.policy.wishes and not left_out:
        notes.append(f"Parameters are kept in FP8 if the optimizer is {capabilities.FUSED_ADAM}.")
    return notes


def _unsupported_notes(plan: InitPlan) -> list[str]:
    """Return a note if `mpguard launch` would refuse the written files."""
    targets = capabilities.targets_of_run("accelerate", plan.policy, plan.strategy)
    message = capabilities.unsupported_message(
        plan.policy, capabilities.unsupported_fields(plan.policy, targets, plan.strategy), targets
    )
    return [f"As written, `mpguard launch` will refuse it: {message}."] if message else []


def _processes(strategy: str, device: str, here: hardware.Hardware) -> int:
    if strategy == "single":
        return 1
    if device == "cpu" or not here.gpus:
        return 2
    return max(here.gpus, 2) if strategy == "ddp" else here.gpus


def _files(plan: InitPlan) -> list[Document]:
    """Return the YAML, and the DeepSpeed JSON where one is needed, with the policy applied."""
    policy, strategy = plan.policy, plan.strategy
    left_out = capabilities.left_out_at_start(policy, strategy, plan.processes)
    policy = policy.replace(**dict.fromkeys(left_out, False), name=policy.name)
    base = parse(_yaml(plan), str(plan.output), "yaml")
    changes = mp_yaml.changes(base.require(), plan.recipe)
    if not plan.at_launch:
        changes += targets.differences(base.data, policy, "accelerate", strategy)
    files = [parse(apply_edits(base.text, base.edits(changes)), base.path, "yaml")]
    if plan.deepspeed_config is not None:
        second = parse(json.dumps(_deepspeed(plan), indent=2) + "\n", str(plan.deepspeed_config), "json")
        changes = targets.differences(second.data, policy, "deepspeed", strategy)
        files.append(parse(apply_edits(second.text, second.edits(changes)), second.path, "json"))
    return files


def _deepspeed(plan: InitPlan) -> dict[str, Any]:
    """Return the DeepSpeed config without the policy."""
    zero: dict[str, Any] = {"stage": plan.stage}
    if plan.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    sizes = {"train_micro_batch_size_per_gpu": plan.batch_size or "auto"}
    return {**sizes, "gradient_accumulation_steps": 1 if plan.batch_size else "auto", "zero_optimization": zero}


def _yaml(plan: InitPlan) -> str:
    """Return the accelerate config without the policy."""
    cpu = plan.device == "cpu"
    kind = "MULTI_CPU" if cpu and plan.strategy == "ddp" else DISTRIBUTED_TYPE.get(plan.strategy, "DEEPSPEED")
    second = plan.deepspeed_config
    compute = "by hardware" if plan.at_launch else f"{plan.policy.compute_dtype} compute"
    precision = "mixed_precision: 'no'"
    if plan.at_launch:
        precision = "# mixed_precision: set by `mpguard launch`, which decides by the hardware"
    elif second is not None:
        precision = f"# mixed_precision: set in {second}; accelerate refuses it in both files"
    text = f"""\
# {plan.recipe} ({compute}), strategy {plan.strategy}: an accelerate config, by mpguard.
#   mpguard launch --config {plan.output} train.py   runs a script with it, and proves the precision
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
{precision}
num_machines: 1
machine_rank: 0
num_processes: {plan.processes} # {"on the CPU" if cpu else "one per GPU"}
main_training_function: main
use_cpu: {"true" if cpu else "false"}
debug: false
"""
    if plan.strategy in FSDP:
        # accelerate refuses cpu_ram_efficient_loading together with torchao's FP8
        inefficient = plan.policy.low_bit_recipe or plan.at_launch
        text += FSDP[plan.strategy].format(efficient="false" if inefficient else "true")
    if plan.stage is not None:
        text += f"deepspeed_config:\n  zero3_init_flag: {'true' if plan.stage == 3 else 'false'}\n"
        if second is not None:
            text += f"  deepspeed_config_file: {second} # relative to the folder that you launch from\n"
        else:
            text += f"  zero_stage: {plan.stage}\n  gradient_accumulation_steps: 1\n"
    return (
        text
        + f"""\
# mpguard's keys: accelerate passes them through, mpguard enforces them
fp8_config:
  mpguard_recipe: {plan.recipe}
  # mpguard_overrides: {{grad_reduce_in_fp32: false}} # any field of the policy
"""
    )


def _check_paths(paths: list[Path], force: bool) -> None:
    if paths[0].suffix == ".json":
        raise ConfigError(f"{paths[0]}: init writes YAML; a name that ends in .yaml is needed")
    for path in paths:
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}. Create it first")
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; a file name is needed")
        if os.path.lexists(path) and not force:
            raise ConfigError(f"{path}: already exists, and was not changed. {_instead(path, paths[0])}")


def _instead(path: Path, config: Path) -> str:
    if path == config:
        return "Use --force to overwrite it, or -o for another name"
    return (
        f"Use --force to overwrite it. To keep it, write both files to another folder (-o FOLDER/{config.name}), name "
        f"yours there as `deepspeed_config_file`, and run `mpguard apply RECIPE FOLDER/{config.name} {path.name}`"
    )


def _print(plan: InitPlan, files: list[Document], notes: list[str], form: str) -> None:
    following = f"mpguard launch --config {plan.output} train.py"
    if form == "json":
        facts = {
            "version": 1,
            "recipe": plan.recipe,
            "strategy": plan.strategy,
            "device": plan.device,
            "num_processes": plan.processes,
            "files": [{"path": each.path, "content": each.data} for each in files],
            "notes": notes,
            "next": following,
        }
        print(json.dumps(facts, indent=2))
        return
    plural = "es" * (plan.processes > 1)
    names = " and ".join(each.path for each in files)
    lines = [f"Wrote {names}: {plan.recipe}, {plan.strategy}, {plan.processes} process{plural}."]
    width = max(len(each.path) for each in files)
    for each in files:
        for key, value in _precision(each, plan).items():
            lines.append(f"  {each.path:{width}}  {key}: {show(value)}")
    where = "" if plan.device == "cpu" or hardware.detect().gpu else ", on a machine with a GPU"
    write_lines([(line, "")] for line in (*lines, *notes, f"Next{where}: {following}"))


def _precision(document: Document, plan: InitPlan) -> dict[str, Any]:
    """Return the settings of a file that the policy determines."""
    target = "deepspeed" if document.format == "json" else "accelerate"
    keys = [
        *([mp_yaml.RECIPE] if target == "accelerate" else []),
        *targets.get(target).settings(plan.policy, plan.strategy),
    ]
    values = {key: targets.lookup(document.data, key) for key in keys}
    return {key: value for key, value in values.items() if value is not ABSENT}
