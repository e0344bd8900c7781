"""Checks before training: runs that the stock libraries would silently degrade.

Each check yields messages: where, what is, what would happen, what to do. With `enforce: error` a
launch for which there is any is refused.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.core.errors import ConfigError
from mpguard.document import Document, mp_yaml, read, validation
from mpguard.document.ignored_keys import ignored, of_deepspeed
from mpguard.document.schemas.accelerate import OLD, TOP
from mpguard.document.schemas.deepspeed import optimizer_class
from mpguard.nn import compile as compilation
from mpguard.policy import hardware
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import EMULATED
from mpguard.runtime.plan import Plan, deepspeed_file
from mpguard.targets.inject import Change, differences
from mpguard.targets.settings import ABSENT, Setting, lookup, merged, show

_USE_CPU_OR_GPU = "Set `distributed_type: MULTI_CPU`, or run where there is a GPU"


@dataclasses.dataclass(frozen=True)
class PlannedLaunch:
    """The launch to be checked.

    kind: accelerate's `distributed_type`, after flags. changes: how the config must change for the policy.
    accelerator: True if there is a GPU or another accelerator.
    """

    plan: Plan
    document: Document
    kind: str
    changes: tuple[Change, ...]
    accelerator: bool

    @property
    def config(self) -> Mapping[str, Any]:
        return self.document.require()

    def at(self, key: str) -> str:
        """Return ` (line 3)` for a key of the config; empty if the config does not have it."""
        entry = self.document.entry(key)
        return "" if entry is None else f" (line {self.document.position(entry.key_span[0])[0]})"

    def request(self, key: str, value: object, requested: str) -> str:
        """Return `mp.yaml asks for FSDP (line 3)`, or the same of the command line if the value comes from there."""
        if str(self.config.get(key)) == str(value):
            return f"{self.document.path} asks for {requested}{self.at(key)}"
        return f"the command line asks for {requested}"


def check_config(document: Document, flags: Collection[str]) -> None:
    """Raise `ConfigError` for a config that accelerate would refuse, with the line and a similar name.

    accelerate would report neither, and name the temporary copy of the file. flags: the names of those that are given.
    """
    config = document.require()
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(
            f"{document.path}: is for SageMaker, where accelerate starts the script with another launcher. "
            'Call mpguard.activate("RECIPE") in the script'
        )
    if not (TOP | OLD) & config.keys():
        keys = ", ".join(f"`{key}`" for key in list(config)[:3])
        raise ConfigError(
            f"{document.path}: is not an accelerate config; its keys are {keys}. `mpguard init RECIPE -o FILE` writes "
            "one"
        )
    for problem in validation.accelerate_problems(document):
        replaced = problem.is_removed_by(flags) or problem.flag == "mixed_precision"  # which the policy replaces
        if problem.undecided and problem.unknown and not _has_key(problem.key):
            raise ConfigError(f"{document.where(problem.key)}: the installed accelerate has no such key{problem.hint}")
        if not replaced and not problem.undecided:
            raise ConfigError(problem.message(document))
    _check_deepspeed_file(document)


def _check_deepspeed_file(document: Document) -> None:
    """Raise `ConfigError` for a DeepSpeed file that DeepSpeed refuses when it parses it, in each process."""
    config = document.require()
    named = deepspeed_file(config, Path(document.path)) if config.get("distributed_type") == "DEEPSPEED" else None
    if named is None or named.problems or not isinstance(named.data, dict):
        return
    if "zero_optimization" not in named.data:
        raise ConfigError(f"{named.path}: has no section `zero_optimization`, and accelerate stops. Add it")
    for problem in validation.deepspeed_problems(named):
        if problem.flag != "mixed_precision":  # which the policy replaces
            raise ConfigError(problem.message(named))


def ignored_keys(document: Document) -> Iterator[str]:
    """Yield a line for each key of the config, and of the DeepSpeed file that it names, that its program ignores.

    So for each that mpguard does not know, and for what is offloaded at a stage of ZeRO that ignores it.
    """
    config = document.require()
    named = deepspeed_file(config, Path(document.path)) if config.get("distributed_type") == "DEEPSPEED" else None
    found = (*validation.undecided(document), *ignored(document), *validation.without_effect(document))
    yield from (each.message(document) for each in found)
    if named is not None and not named.problems and isinstance(named.data, dict):
        found = (*validation.undecided(named), *of_deepspeed(named), *validation.without_effect(named))
        yield from (each.message(named) for each in found)


def check_remote_shell(document: Document, kind: str, machines: int, launcher: str | None) -> None:
    """Raise `ConfigError` if DeepSpeed would start the other nodes with a program that is not installed here.

    machines, launcher: the flags `--num_machines` and `--deepspeed_multinode_launcher`, if they are given. accelerate's
    default is pdsh; `standard` and `nossh` are started on each node.
    """
    section = document.require().get("deepspeed_config")
    named = section.get("deepspeed_multinode_launcher") if isinstance(section, Mapping) else None
    launcher = launcher or named or "pdsh"
    if kind != "DEEPSPEED" or machines < 2 or launcher in ("standard", "nossh"):
        return
    missing = [each for each in ("ssh", *(("pdsh",) if launcher == "pdsh" else ())) if shutil.which(each) is None]
    if missing:
        raise ConfigError(
            f"{document.path}: DeepSpeed starts the other nodes with `deepspeed_multinode_launcher: {launcher}`, which "
            f"needs {' and '.join(f'`{each}`' for each in missing)}, not installed here. Install it, or set "
            "`deepspeed_multinode_launcher: standard` and launch on each node"
        )


def _has_key(key: str) -> bool:
    """True if the installed accelerate has a top-level key. It is asked for keys that a newer version may have."""
    from accelerate.commands.config.config_args import ClusterConfig

    return key in ClusterConfig.__dataclass_fields__


#: How the names of configs end.
_ENDINGS = (".yaml", ".yml", ".json")
#: The message of a launch without a config.
NO_CONFIG = (
    "no --config is given; the command is mpguard launch --config mp.yaml SCRIPT "
    "(`mpguard init bf16_mixed` writes an mp.yaml)"
)


def check_named_config(argv: Sequence[str]) -> None:
    """Raise the errors of the config that a command line names, or that it names none, before torch is imported.

    Only accelerate's own parser knows where the script begins: `--config` behind the first Python file is its argument.
    """
    words = list(argv)
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    for place, word in enumerate(words[:script]):
        name, equals, value = word.partition("=")
        if name not in ("--config", "--config_file", "--config-file"):
            continue
        path = Path(value if equals else next(iter(words[place + 1 : script]), ""))
        if path.is_file():
            document = read(path)
            given = (each.partition("=")[0] for each in words[:script] if each.startswith("--"))
            check_config(document, {each.removeprefix("--").replace("-", "_") for each in given})
            mp_yaml.load_policy(path)
        return
    if script < len(words) and not any(word.startswith("--c") or word.endswith(_ENDINGS) for word in words):
        raise ConfigError(NO_CONFIG)


def refusals(launch: PlannedLaunch) -> Iterator[str]:
    """Yield a message for each reason to refuse the launch."""
    yield from _engine(launch)
    yield from config_refusals(launch)
    yield from _hardware(launch)


def config_refusals(launch: PlannedLaunch) -> Iterator[str]:
    """Yield the refusals that the config itself causes, on any machine."""
    yield from _conflicting_keys(launch)
    yield from _deepspeed_file(launch)
    yield from _muon_states(launch)


def _engine(launch: PlannedLaunch) -> Iterator[str]:
    """Yield refusals for engines that accelerate would not apply here, and processes that it would not start.

    The findings are S21, S22 and S23.
    """
    kind, processes = launch.kind, launch.plan.processes or 1
    request = launch.request("distributed_type", kind, kind)
    ignored = (
        f", and `use_cpu: true`{launch.at('use_cpu')} is ignored with {kind}" if launch.config.get("use_cpu") else ""
    )
    if kind == "NO" and processes > 1:
        yield (
            f"{launch.request('num_processes', processes, f'{processes} processes')} with `distributed_type: NO`"
            f"{launch.at('distributed_type')}, which starts one process. Set `distributed_type: "
            f"{'MULTI_GPU' if launch.accelerator else 'MULTI_CPU'}`, or `num_processes: 1`"
        )
    if launch.accelerator:
        return
    alternative = (
        f". A script that sets up {kind} itself can be started with `torchrun --nproc_per_node {processes} "
        f"-m mpguard.run --config {launch.document.path} SCRIPT`"
    )
    if kind == "FSDP":
        each = " Each process would train a model of its own." if processes > 1 else ""
        yield (
            f"{request}, but accelerate never applies it here: there is no GPU{ignored}.{each} "
            f"{_USE_CPU_OR_GPU}{alternative}"
        )
    elif kind == "DEEPSPEED" and processes > 1:
        yield (
            f"{request} with {processes} processes, which accelerate starts on a GPU only{ignored}. "
            f"{_USE_CPU_OR_GPU}, or set `num_processes: 1`{alternative}"
        )
    elif kind.startswith("MULTI_") and kind != "MULTI_CPU":
        yield (
            f"{request}, but there is no GPU here: {processes} processes would start without a process group in "
            f"common, and each would train a model of its own{ignored}. {_USE_CPU_OR_GPU}"
        )


def _conflicting_keys(launch: PlannedLaunch) -> Iterator[str]:
    """Yield refusals for keys that silently override, or contradict, the precision of the policy (S7, S12)."""
    policy = launch.plan.policy
    for change in launch.changes:
        where = f"{launch.document.path}: `{change.key}: {show(change.old)}`{launch.at(change.key)}"
        if change.key == "deepspeed_config.mixed_precision":
            yield (
                f"{where} silently overrides the top-level mixed_precision; the policy `{policy.name}` must be the "
                "only definition. Remove the key"
            )
        if change.key.endswith("mixed_precision_policy") and change.old is not ABSENT:
            configured = Dtype.spelled(str(change.old))
            if configured is not policy.params_dtype:
                yield (
                    f"{where} is not the dtype that the policy `{policy.name}` computes in ({policy.params_dtype}), "
                    "and accelerate reads no such key. Remove it"
                )


def _deepspeed_file(launch: PlannedLaunch) -> Iterator[str]:
    """Yield refusals for `enabled` keys of a DeepSpeed file that differ from the policy.

    accelerate uses the values of the file (S8, S9).
    """
    document = deepspeed_file(launch.config, Path(launch.document.path)) if launch.kind == "DEEPSPEED" else None
    if document is None:
        return
    policy = launch.plan.policy
    for change in differences(document.require(), policy, "deepspeed"):
        if change.overrides and change.key.endswith("enabled"):
            entry = document.entry(change.key)
            line = f":{document.position(entry.key_span[0])[0]}" if entry else ""
            meaning = ", which here means false" if change.old == "auto" else ""
            if str(change.old).lower() in ("true", "false") and isinstance(change.old, str):
                meaning = " in quotes, a string, which the Trainer and DeepSpeed do not take for a boolean"
            recipe = str(policy.name).partition(" with ")[0]  # `apply` reads the overrides in the config
            yield (
                f"{document.path}{line}: `{change.key}` is {show(change.old)}{meaning}; the policy `{policy.name}` "
                f"needs {show(change.new)}. Run `mpguard apply {recipe} {launch.document.path} {document.path}`"
            )


def _muon_states(launch: PlannedLaunch) -> Iterator[str]:
    """Yield a refusal for Muon in a DeepSpeed file whose momentum will not have the policy's dtype.

    The engine would be refused with the same reason (`runtime.patches.deepspeed_config.muon_states`).
    """
    document = deepspeed_file(launch.config, Path(launch.document.path)) if launch.kind == "DEEPSPEED" else None
    momentum = launch.plan.muon_momentum
    if document is None or momentum is None or str(lookup(document.require(), "optimizer.type")).lower() != "muon":
        return
    if lookup(document.data, "torch_autocast.enabled") is True:  # whose parameters are FP32
        return
    policy, (dtype, advice) = launch.plan.policy, momentum
    changes = differences(document.data, policy, "deepspeed")
    after = merged(document.data, {change.key: Setting(change.new) for change in changes})
    if optimizer_class(after) == "DeepSpeedZeroOptimizer":
        yield (
            f"{document.where('optimizer.type')}: DeepSpeed's ZeRO-{lookup(after, 'zero_optimization.stage')} holds "
            f"the momentum of Muon in {dtype}, the dtype of the parameters; the policy `{policy.name}` needs "
            f"{policy.master_dtype}. Use {advice}"
        )


def runs_on_cpu(launch: PlannedLaunch) -> bool:
    """True if the config asks for the CPU."""
    return mp_yaml.runs_on_cpu({**launch.config, "distributed_type": launch.kind})


def _hardware(launch: PlannedLaunch) -> Iterator[str]:
    """Yield refusals for a policy that this machine cannot run, or cannot compile as it requires (S10, S19)."""
    here = hardware.detect()
    if runs_on_cpu(launch):
        here = here.cpu
    if missing := here.refuses(launch.plan.policy):
        recipes = set(launch.plan.policy.recipes)
        emulate = "torchao" in here.libraries and bool(recipes) and recipes <= set(EMULATED)
        how = ". To rehearse it here in software, slowly: `mpguard launch --emulate`" if emulate else ""
        yield f"the policy `{launch.plan.policy.name}` does not run here: {missing}{how}"
    if conflict := compilation.conflict(launch.plan.policy):
        yield conflict
