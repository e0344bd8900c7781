"""The values that accelerate parses in its config, and the keys that contradict each other. From accelerate 1.15.0.

`accelerate launch` copies values to its arguments without a check: text for a switch counts as true, and most of the
others end the workers, after torch is imported. tests/document/schemas/test_accelerate_schema.py runs accelerate.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.core.errors import did_you_mean, near
from mpguard.document.schemas.accelerate import PARALLELISM_PREFIX, SECTIONS
from mpguard.document.values import (
    SECTION,
    SWITCH,
    TRUTHY,
    WHOLE,
    WHOLE_FROM_0,
    ConfigProblem,
    ValueKind,
    is_filled_in,
    number,
    one_of,
    wrong_values,
)
from mpguard.targets.settings import show

if TYPE_CHECKING:
    from mpguard.document import Document

#: The members of `accelerate.utils.DistributedType`.
DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "DEEPSPEED",
    "FSDP", "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON",
)  # fmt: skip
#: The members of `accelerate.utils.DynamoBackend`, in lower case: accelerate reads them in either.
DYNAMO_BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron",
)  # fmt: skip
_DYNAMO = one_of(*DYNAMO_BACKENDS, fold=True, also=(False,))  # the boolean has a text of its own
#: The keys that name a backend of torch.compile.
DYNAMO_KEYS = ("dynamo_config.dynamo_backend", "dynamo_config.backend", "dynamo_backend")


def _in_section(section: str, kinds: Mapping[str, ValueKind]) -> dict[str, ValueKind]:
    """Return kinds by the dotted keys of a section, in both spellings: with its prefix and without."""
    prefixes = {"", SECTIONS[section].prefix}
    return {f"{section}.{prefix}{key}": kind for prefix in sorted(prefixes) for key, kind in kinds.items()}


_IDS = re.compile(r"all|[\w.:/-]+( ?, ?[\w.:/-]+)*")  # numbers, or UUIDs of GPUs
#: Dotted key -> the values that accelerate can parse there, whatever is launched. A section that is none is lost.
VALUES: Mapping[str, ValueKind] = {
    "compute_environment": one_of("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    "use_cpu": SWITCH,
    **dict.fromkeys(("debug", "enable_cpu_affinity"), TRUTHY),
    "gpu_ids": ValueKind(
        "text is needed, all or ids with commas between them: '0,1'",
        lambda value: isinstance(value, str) and _IDS.fullmatch(value.strip()) is not None,
    ),
    "machine_rank": WHOLE_FROM_0,
    **dict.fromkeys(DYNAMO_KEYS, _DYNAMO),
    **_in_section("dynamo_config", dict.fromkeys(("use_fullgraph", "use_dynamic", "use_regional_compilation"), SWITCH)),
    **dict.fromkeys(
        ("deepspeed_config", "dynamo_config", "fsdp_config", "megatron_lm_config", "mpirun_config",
         "parallelism_config"),
        SECTION,
    ),
}  # fmt: skip
#: The modes, in upper or lower case; `deepspeed_config.mixed_precision` is used before the top level (S7).
MODES = ("no", "fp16", "bf16", "fp8")
MODES_OF = dict.fromkeys(("mixed_precision", "deepspeed_config.mixed_precision"), one_of(*MODES, fold=True))
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


def _numbered(*words: str) -> ValueKind:
    """Return the kind of the names of an enumeration, or their numbers from 1."""
    names = one_of(*words, fold=True)
    numbers = {str(number) for number in range(1, len(words) + 1)}
    return ValueKind(names.needed, lambda value: str(value) in numbers or names.parses(value), words)


_FSDP = {
    "version": ValueKind("it is 1 or 2", lambda value: str(value) in ("1", "2")),
    "auto_wrap_policy": one_of("transformer_based_wrap", "size_based_wrap", "no_wrap", fold=True),
    "state_dict_type": _numbered("full_state_dict", "local_state_dict", "sharded_state_dict"),
    "backward_prefetch": _numbered("backward_pre", "backward_post", "no_prefetch"),
    **dict.fromkeys(
        ("offload_params", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states", "forward_prefetch",
         "activation_checkpointing", "activation_checkpointing_offload"),
        SWITCH,
    ),
}  # fmt: skip
#: FSDP's version -> the same for the key that this version reads.
_FSDP_OF_VERSION = {
    "1": {"sharding_strategy": _numbered(*_STRATEGIES)},
    "2": {"reshard_after_forward": ValueKind("true or false is needed with FSDP2", SWITCH.parses)},
}
_DEVICE = one_of("none", "cpu", "nvme", fold=True)
_DEEPSPEED = {
    "zero_stage": ValueKind("it is one of 0, 1, 2, 3", lambda value: str(value) in ("0", "1", "2", "3")),
    "gradient_clipping": ValueKind("a number is needed", lambda value: value == "auto" or number(value) is not None),
    "gradient_accumulation_steps": ValueKind(
        "a whole number is needed", lambda value: value == "auto" or WHOLE.parses(value)
    ),
    "offload_optimizer_device": _DEVICE,
    "offload_param_device": _DEVICE,
    "zero3_init_flag": SWITCH,
    "zero3_save_16bit_model": SWITCH,
}
#: The modes of torch.compile, which inductor reads.
_COMPILE_MODES = one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: The names of torch's own rendezvous; others can be registered, so that only misspellings are wrong.
RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
_RENDEZVOUS = ValueKind(
    "the name of a rendezvous is needed",
    lambda value: value in RENDEZVOUS or not near(str(value), RENDEZVOUS),
    RENDEZVOUS,
)
_THREE = ValueKind(
    "a list of three is needed", lambda value: not isinstance(value, (bool, int, float, dict)) and len(value) > 2
)
#: FP8 backend -> the keys that it reads, which a policy replaces.
_FP8 = {
    "TE": {
        "format": one_of("hybrid", "e4m3", "e5m2", fold=True),
        "amax_compute_algo": one_of("max", "most_recent", fold=True),
        **dict.fromkeys(("margin", "interval", "amax_history_len"), WHOLE),
        **dict.fromkeys(("use_autocast_during_eval", "use_mxfp8_block_scaling"), SWITCH),
        "override_linear_precision": ValueKind(
            "a list of three is needed: `[false, false, false]`", lambda value: not isinstance(value, str)
        ),
    },
    "AO": dict.fromkeys(("pad_inner_dim", "enable_fsdp_float8_all_gather"), SWITCH),
    "MSAMP": {"opt_level": one_of("O1", "O2")},
}
_SIZE = ValueKind("a number from 1 is needed", lambda value: type(value) is int and value > 0)
_SIZES = tuple(f"{PARALLELISM_PREFIX}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"))
_PARALLELISM = {
    **dict.fromkeys((f"parallelism_config.{key}" for key in _SIZES), _SIZE),
    f"parallelism_config.{PARALLELISM_PREFIX}cp_backend": one_of("torch"),
    f"parallelism_config.{PARALLELISM_PREFIX}sp_backend": one_of("deepspeed"),
    f"parallelism_config.{PARALLELISM_PREFIX}cp_comm_strategy": one_of("allgather", "alltoall"),
}
#: `distributed_type` -> the same for keys that are read under it only.
_OF_TYPE: Mapping[str, Mapping[str, ValueKind]] = {
    "FSDP": _in_section("fsdp_config", _FSDP),
    "DEEPSPEED": _in_section("deepspeed_config", _DEEPSPEED),
}
#: The same for keys that are read where more than one process is started.
_OF_PROCESSES: Mapping[str, ValueKind] = {"main_process_port": WHOLE, "rdzv_backend": _RENDEZVOUS}
#: The same where more than one machine is used.
_OF_MACHINES: Mapping[str, ValueKind] = {
    "same_network": TRUTHY,
    "deepspeed_config.deepspeed_multinode_launcher": one_of(
        "pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"
    ),
}
#: Keys whose value is a number from 1.
COUNTS = ("num_processes", "num_machines")


def problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield the values that no launch can use, and the keys that contradict each other."""
    config: dict[str, Any] = document.data
    kind = config.get("distributed_type")
    if isinstance(kind, str) and kind not in DISTRIBUTED_TYPES and not is_filled_in(kind):
        meant = did_you_mean(kind.upper(), DISTRIBUTED_TYPES) or f"; it is one of {', '.join(DISTRIBUTED_TYPES)}"
        yield ConfigProblem("distributed_type", f"accelerate has no `{kind}`{meant}", listed=True)
    for key in COUNTS:
        value = config.get(key)
        valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is not None and not valid and not is_filled_in(value):
            yield ConfigProblem(key, f"is {show(value)}; a number from 1 is needed", flag=key)
    for each in wrong_values(document, _in_force(config)):
        yield dataclasses.replace(each, flag=_flag(each.key))
    replaced = wrong_values(document, _replaced(config))
    for each in (*replaced, *wrong_values(document, MODES_OF, (None, False, True))):
        yield dataclasses.replace(each, flag="mixed_precision")
    yield from _contradictions(config)
    yield from _without_address(config)


def booleans(document: Document) -> Iterator[ConfigProblem]:
    """Yield the modes and backends that are booleans, because YAML reads an unquoted `no` so; lint has MPG802."""
    under_deepspeed = document.data.get("distributed_type") == "DEEPSPEED"  # which gets no setting of dynamo (S27)
    for key in ("mixed_precision", *(() if under_deepspeed else DYNAMO_KEYS)):
        entry = document.entry(key)
        if entry is None or not isinstance(entry.value, bool):
            continue
        reason = (
            f"is the boolean {show(entry.value)}, because YAML reads an unquoted `{'yes' if entry.value else 'no'}` so;"
            " accelerate stops with AttributeError. Write 'no' with quotation marks, or the name that is meant"
        )
        yield ConfigProblem(key, reason, flag="mixed_precision" if key == "mixed_precision" else "dynamo_backend")


def _in_force(config: Mapping[str, Any]) -> Mapping[str, ValueKind]:
    """Return the kinds of the values that a launch with this config reads."""
    kind, kinds = str(config.get("distributed_type")), dict(VALUES)
    kinds |= _OF_TYPE.get(kind, {})
    if kind == "FSDP":
        version = str(_setting(config, "fsdp_config", "version", 1))
        kinds |= _in_section("fsdp_config", _FSDP_OF_VERSION.get(version, {}))
        if str(_setting(config, "fsdp_config", "auto_wrap_policy")).upper() == "SIZE_BASED_WRAP":
            kinds |= _in_section("fsdp_config", {"min_num_params": WHOLE})
    if config.get("num_processes", 1) != 1:
        kinds |= _OF_PROCESSES
    if config.get("num_machines", 1) != 1:
        kinds |= _OF_MACHINES
    if str(_setting(config, "dynamo_config", "backend")).lower() == "inductor" and kind != "DEEPSPEED":
        kinds |= _in_section("dynamo_config", {"mode": _COMPILE_MODES})
    if _is_fp8(config):
        kinds |= _in_section("fp8_config", {"override_linear_precision": _THREE})
    if isinstance(config.get("parallelism_config"), Mapping):
        kinds |= _PARALLELISM
    return kinds


def _replaced(config: Mapping[str, Any]) -> Mapping[str, ValueKind]:
    """Return the kinds of the values of FP8, which the workers read if no policy replaces them."""
    backend = str(_setting(config, "fp8_config", "backend", "TE")).upper()
    return _in_section("fp8_config", _FP8.get(backend, {})) if _is_fp8(config) else {}


def _is_fp8(config: Mapping[str, Any]) -> bool:
    """True if the launcher passes `fp8_config` to the workers (S24)."""
    return str(config.get("mixed_precision")).lower() == "fp8" and config.get("distributed_type") != "DEEPSPEED"


def _setting(config: Mapping[str, Any], name: str, key: str, default: Any = None) -> Any:
    """Return the value of a key of a section, in either spelling: with the section's prefix or without."""
    section = config.get(name)
    if not isinstance(section, Mapping):
        return default
    return section.get(SECTIONS[name].prefix + key, section.get(key, default))


def _flag(key: str) -> str:
    """Return the flag of `accelerate launch` that replaces a key: `fsdp_version` for `fsdp_config.version`."""
    section, _, bare = key.rpartition(".")
    return SECTIONS[section].prefix + SECTIONS[section].bare(bare) if section in SECTIONS else key


def _contradictions(config: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the keys with which accelerate stops because of another one."""
    kind, ids = str(config.get("distributed_type")), config.get("gpu_ids")
    starts_several = kind.startswith("MULTI_") and kind != "MULTI_CPU"
    one = isinstance(ids, str) and ids.strip() != "all" and "," not in ids and VALUES["gpu_ids"].parses(ids)
    if starts_several and one and not is_filled_in(ids) and config.get("num_machines", 1) in (None, 1):
        reason = f"is {ids}, one GPU, and {kind} needs two or more: accelerate stops. List them, or write all"
        yield ConfigProblem("gpu_ids", reason, flag="gpu_ids")
    machines, rank = config.get("num_machines"), config.get("machine_rank")
    if isinstance(machines, int) and isinstance(rank, int) and rank >= machines > 0:
        reason = f"is {rank}, and `num_machines` is {machines}: the ranks of machines begin at 0"
        yield ConfigProblem("machine_rank", reason, flag="machine_rank")
    if kind != "FSDP":
        return
    loading, synchronized = (
        _setting(config, "fsdp_config", key) for key in ("cpu_ram_efficient_loading", "sync_module_states")
    )
    if synchronized is False and loading is not False:
        section = config["fsdp_config"]
        written = next(key for key in ("fsdp_sync_module_states", "sync_module_states") if key in section)
        reason = "is false, and `fsdp_cpu_ram_efficient_loading` is not: accelerate stops. Set both to false"
        yield ConfigProblem(f"fsdp_config.{written}", reason, flag="fsdp_sync_module_states")
    yield from _parallelism(config)


def _without_address(config: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the keys of the first machine's address that a launch on several machines needs.

    DeepSpeed's launchers take it from their file of hosts; torch's get the host "None". `NO` also needs a port, and so
    does `MULTI_CPU` without mpguard, which starts it as torchrun does; it is 29500 elsewhere. `machine_rank` is 0 if
    nothing gives it, which is right on one machine.
    """
    kind, machines = str(config.get("distributed_type")), config.get("num_machines")
    section = config.get("deepspeed_config")
    launcher = section.get("deepspeed_multinode_launcher") if isinstance(section, Mapping) else None
    if type(machines) is not int or machines < 2 or kind == "XLA" or (kind == "DEEPSPEED" and launcher != "standard"):
        return
    simple, changed = kind in ("NO", "MULTI_CPU"), ("deepspeed_multinode_launcher",) if kind == "DEEPSPEED" else ()
    for key in ("main_process_ip", *(("main_process_port",) if kind == "NO" else ())):
        if config.get(key) is None:
            end = "accelerate stops" if simple else "the workers look for a host that is named None"
            reason = f"is {machines}, and no `{key}` is given: {end}. Add it, or pass `--{key}`"
            yield ConfigProblem("num_machines", reason, unless=(key, "num_machines", *changed))


def _parallelism(config: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield sizes of `parallelism_config` with which accelerate stops under FSDP2."""
    section, processes = config.get("parallelism_config"), config.get("num_processes")
    if not isinstance(section, Mapping) or not section or not isinstance(processes, int):
        return
    sizes = {key: section.get(key, 1) for key in _SIZES}
    if not all(_SIZE.parses(size) for size in sizes.values()) or sizes[_SIZES[-1]] > 1:  # DeepSpeed's own, of sequences
        return
    total = math.prod(sizes.values())
    if total not in (1, processes):
        reason = f"its sizes make {total} processes, and `num_processes` is {processes}: accelerate stops"
        yield ConfigProblem("parallelism_config", reason, flag="num_processes")
    elif processes > 1 and str(_setting(config, "fsdp_config", "version", 1)) == "2":
        shard, context = f"{PARALLELISM_PREFIX}dp_shard_size", f"{PARALLELISM_PREFIX}cp_size"
        if sizes[shard] == sizes[context] == 1:
            reason = f"FSDP has nothing to shard over: `{shard}` and `{context}` are 1, and accelerate stops"
            yield ConfigProblem("parallelism_config", reason)
