"""What can be known before training: runs that the stock stack lets degrade in silence.

Each check yields sentences: where, what is, what would happen, what to do. With `enforce: error` a
launch that has any is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core.errors import ConfigError, did_you_mean
from mpguard.document import Document
from mpguard.document.schemas.accelerate import OLD, unknown_key
from mpguard.nn import compile as compilation
from mpguard.policy import hardware
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import Plan, deepspeed_file
from mpguard.targets.inject import Change, differences
from mpguard.targets.settings import ABSENT, show

_EITHER = "Set `distributed_type: MULTI_CPU`, or run where there is a GPU"


@dataclasses.dataclass(frozen=True)
class PlannedLaunch:
    """What is about to be launched.

    kind: accelerate's `distributed_type`, flags considered; changes: what the policy makes of the
    config; accelerator: whether there is a GPU or its like.
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
        """`(line 3)` of a key, where the config has it."""
        entry = self.document.entry(key)
        return "" if entry is None else f" (line {self.document.position(entry.key_span[0])[0]})"

    def asks(self, key: str, value: object, for_what: str) -> str:
        """`mp.yaml asks for FSDP (line 3)`; of the command line where that says it."""
        if str(self.config.get(key)) == str(value):
            return f"{self.document.path} asks for {for_what}{self.at(key)}"
        return f"the command line asks for {for_what}"


def readable(document: Document, processes: int | None) -> None:
    """Raises `ConfigError` for what accelerate would refuse in its own copy of the file, without line or near name.

    processes: what the command line says.
    """
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import DistributedType

    known = {*ClusterConfig.__dataclass_fields__, *OLD}
    config = document.require()
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(
            f"{document.path}: is for SageMaker, where accelerate starts the script with a launcher of its own. "
            'Call mpguard.activate("RECIPE") in the script'
        )
    if not known & config.keys():
        keys = ", ".join(f"`{key}`" for key in list(config)[:3])
        raise ConfigError(
            f"{document.path}: is no accelerate config; its keys are {keys}. `mpguard init RECIPE -o FILE` writes one"
        )
    for key in config:
        if key not in known:
            raise ConfigError(f"{document.where(str(key))}: accelerate has no such key{unknown_key(str(key)) or ''}")
    kinds = list(DistributedType.__members__)
    kind, said = config.get("distributed_type"), config.get("num_processes")
    if isinstance(kind, str) and kind not in kinds:
        hint = did_you_mean(kind.upper(), kinds) or f"; it is one of {', '.join(kinds)}"
        raise ConfigError(f"{document.where('distributed_type')}: accelerate has no `{kind}`{hint}")
    number = isinstance(said, int) and not isinstance(said, bool) and said > 0
    if said is not None and not number and processes is None:
        raise ConfigError(f"{document.where('num_processes')}: is {show(said)}; a number from 1 is needed")


def refusals(launch: PlannedLaunch) -> Iterator[str]:
    """Everything that speaks against the launch."""
    yield from _engine(launch)
    yield from _beaten(launch)
    yield from _deepspeed_file(launch)
    yield from _hardware(launch)


def _engine(launch: PlannedLaunch) -> Iterator[str]:
    kind, processes = launch.kind, launch.plan.processes or 1
    asks = launch.asks("distributed_type", kind, kind)
    ignored = (
        f", and `use_cpu: true`{launch.at('use_cpu')} is ignored beside {kind}" if launch.config.get("use_cpu") else ""
    )
    if kind == "NO" and processes > 1:
        yield (
            f"{launch.asks('num_processes', processes, f'{processes} processes')} with `distributed_type: NO`"
            f"{launch.at('distributed_type')}, which starts one. Set `distributed_type: "
            f"{'MULTI_GPU' if launch.accelerator else 'MULTI_CPU'}`, or `num_processes: 1`"
        )
    if launch.accelerator:
        return
    own = (
        f". A script that makes its {kind} itself is started by `torchrun --nproc_per_node {processes} -m mpguard.run "
        f"--config {launch.document.path} SCRIPT`"
    )
    if kind == "FSDP":
        each = " Each process would train a model of its own." if processes > 1 else ""
        yield f"{asks}, but accelerate never applies it here: there is no GPU{ignored}.{each} {_EITHER}{own}"
    elif kind == "DEEPSPEED" and processes > 1:
        yield (
            f"{asks} with {processes} processes, which accelerate starts on a GPU only{ignored}. "
            f"{_EITHER}, or set `num_processes: 1`{own}"
        )
    elif kind.startswith("MULTI_") and kind != "MULTI_CPU":
        yield (
            f"{asks}, but there is no GPU here: {processes} processes would start that do not know of each other, "
            f"and each would train a model of its own{ignored}. {_EITHER}"
        )


def _beaten(launch: PlannedLaunch) -> Iterator[str]:
    """Keys that silently beat, or contradict, the one precision (S7, S12)."""
    policy = launch.plan.policy
    for change in launch.changes:
        where = f"{launch.document.path}: `{change.key}: {show(change.old)}`{launch.at(change.key)}"
        if change.key == "deepspeed_config.mixed_precision":
            yield (
                f"{where} silently beats the top-level mixed_precision; the policy `{policy.name}` says it alone. "
                "Remove the key"
            )
        if change.key.endswith("mixed_precision_policy") and change.old is not ABSENT:
            said = Dtype.spelled(str(change.old))
            if said is not policy.params_dtype:
                yield (
                    f"{where} is not what the policy `{policy.name}` computes in ({policy.params_dtype}), "
                    "and accelerate reads no such key. Remove it"
                )


def _deepspeed_file(launch: PlannedLaunch) -> Iterator[str]:
    """Switches in a DeepSpeed file that are not the policy's: accelerate lets the file win (S8, S9)."""
    document = deepspeed_file(launch.config, Path(launch.document.path)) if launch.kind == "DEEPSPEED" else None
    if document is None:
        return
    policy = launch.plan.policy
    for change in differences(document.require(), policy, "deepspeed"):
        if change.overrides and change.key.endswith("enabled"):
            entry = document.entry(change.key)
            line = f":{document.position(entry.key_span[0])[0]}" if entry else ""
            means = ", which here means false" if change.old == "auto" else ""
            yield (
                f"{document.path}{line}: `{change.key}` is {show(change.old)}{means}; the policy `{policy.name}` needs "
                f"{show(change.new)}. Run `mpguard apply {policy.name} {launch.document.path} {document.path}`"
            )


def _hardware(launch: PlannedLaunch) -> Iterator[str]:
    lacking = hardware.detect().refuses(launch.plan.policy)
    if lacking:
        yield f"the policy `{launch.plan.policy.name}` does not run here: {lacking}"
    if compiled := compilation.conflict(launch.plan.policy):
        yield compiled
