"""The table of keys that accelerate reads, against the source of the accelerate that is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from limits import seconds
from processes import in_fork, run_python

from mpguard.document.schemas.accelerate import (
    ARGUMENTS,
    DEEPSPEED,
    DYNAMO,
    FP8,
    FP8_BACKENDS,
    FSDP,
    OLD,
    SAGEMAKER,
    SECTIONS,
    TOP,
    VERSION,
    Section,
    unknown_key,
)
from mpguard.document.schemas.accelerate_values import DISTRIBUTED_TYPES, DYNAMO_BACKENDS

pytest.importorskip("accelerate", reason="the tables are compared with its source")
SPEC = importlib.util.find_spec("accelerate")
assert SPEC is not None and SPEC.origin is not None
PACKAGE = Path(SPEC.origin).parent
LAUNCHERS = [ast.parse((PACKAGE / name).read_text()) for name in ("commands/launch.py", "utils/launch.py")]
WIZARD = ast.parse((PACKAGE / "commands/config/cluster.py").read_text())


def python(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` without a GPU, with what accelerate imports there already."""
    return in_fork(words, cwd=cwd, timeout=seconds(240), program=run_python, CUDA_VISIBLE_DEVICES="", **more)


def printed(code: str) -> str:
    """What Python code prints."""
    done = python("-c", code, cwd=PACKAGE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def arguments_read() -> set[str]:
    """The names in `args.NAME` and `getattr(args, "NAME")` that the launchers read (not only assign)."""
    names: set[str] = set()
    for tree in LAUNCHERS:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_args(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(args, '"):
                names.add(ast.literal_eval(node.args[1]))
    return names


def _is_args(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "args"


def fp8_variables_read() -> set[str]:
    """The names after ACCELERATE_FP8_ that accelerate's workers look up in the environment."""
    names: set[str] = set()
    for path in (PACKAGE / "utils/dataclasses.py", PACKAGE / "accelerator.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            nodes = list(ast.walk(function))
            constants = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            names.update(
                each.removeprefix("ACCELERATE_FP8_") for each in constants if each.startswith("ACCELERATE_FP8_")
            )
            for node in nodes if "ACCELERATE_FP8_" in constants else ():
                if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and node.left.id == "env_prefix":
                    assert isinstance(node.right, ast.Constant)
                    names.add(node.right.value)
    return names - {""}


def wizard_writes(section: str) -> set[str]:
    """The keys that `accelerate config` writes into a section."""
    keys: set[str] = set()
    for node in ast.walk(WIZARD):
        if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == section):
            continue
        if isinstance(node.slice, ast.Constant):
            keys.add(node.slice.value)
        elif isinstance(node.slice, ast.BinOp) and isinstance(node.slice.right, ast.Constant):
            keys.add({"parallelism_config": "parallelism_config_"}.get(section, "dynamo_") + node.slice.right.value)
    return keys


def test_the_table_is_of_the_installed_version() -> None:
    assert importlib.metadata.version("accelerate") == VERSION


def test_fp8_keys_are_the_variables_that_workers_read() -> None:
    assert {key.upper() for key in FP8.keys - {"override_linear_precision"}} == fp8_variables_read()


@pytest.mark.parametrize("section", [FSDP, DYNAMO], ids=["fsdp", "dynamo"])
def test_keys_are_the_arguments_that_launchers_read(section: Section) -> None:
    read = {name.removeprefix(section.prefix) for name in arguments_read() if name.startswith(section.prefix)}
    assert section.keys == read


def test_deepspeed_keys_and_arguments_are_read() -> None:
    options = printed(
        "from accelerate.commands.launch import launch_command_parser as p\n"
        "print(*(action.dest for action in p()._actions))"
    ).split()
    own = {
        name for name in options if "deepspeed" in name or "zero" in name or name.startswith(("gradient_", "offload_"))
    }
    assert DEEPSPEED.keys == (own & arguments_read()) - {"use_deepspeed"}
    assert own - DEEPSPEED.keys - {"use_deepspeed"} == {"offload_optimizer_nvme_path", "offload_param_nvme_path"}
    assert set(options) - {"help"} >= ARGUMENTS - {"use_cpu"}


def test_top_level_keys_are_the_fields_of_the_config_classes() -> None:
    code = (
        "from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig\n"
        "print(*ClusterConfig.__dataclass_fields__)\nprint(*SageMakerConfig.__dataclass_fields__)"
    )
    cluster, sagemaker = (set(line.split()) for line in printed(code).splitlines())
    assert cluster == TOP
    assert sagemaker == SAGEMAKER
    tree = ast.parse((PACKAGE / "commands/config/config_args.py").read_text())
    read = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "config_dict.pop"
        if isinstance(node.args[0], ast.Constant)
    } | {ast.literal_eval(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript)
         and isinstance(node.ctx, ast.Del) and ast.unparse(node.value) == "config_dict"}  # fmt: skip
    assert read == OLD


def test_fp8_backends_are_those_of_the_enum() -> None:
    code = "from accelerate.utils.dataclasses import FP8BackendType as t\nprint(*(each.value for each in t))"
    assert set(FP8_BACKENDS.values()) == set(printed(code).split()) - {"NO"}


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("mixed_precision", None),
        ("fp16", None),
        ("mixed_precission", "; did you mean `mixed_precision`?"),
        ("mpguard_recipe", "; mpguard's keys belong in `fp8_config`"),
        ("fsdp_version", "; it belongs under `fsdp_config`"),
        ("zero_stage", "; it belongs under `deepspeed_config`"),
        ("qqqq", ". Remove it"),
    ],
)
def test_unknown_key(key: str, advice: str | None) -> None:
    assert unknown_key(key) == advice


@pytest.mark.parametrize("name", SECTIONS)
def test_the_wizard_writes_nothing_but_known_and_renamed_keys(name: str) -> None:
    section = SECTIONS[name]
    lost = {section.bare(key) for key in wizard_writes(name)} - section.keys
    expected = {
        "fp8_config": {"amax_history_length", "amax_compute_algorithm", "optimization_level"},
        "deepspeed_config": {"offload_optimizer_nvme_path", "offload_param_nvme_path"},
    }
    assert lost == expected.get(name, set())
    assert set(section.renamed.values()) <= section.keys


def exported(tmp_path: Path, config: str, *options: str) -> dict[str, str]:
    """The environment that the real `accelerate launch` hands to a script."""
    (tmp_path / "mp.yaml").write_text(config)
    (tmp_path / "show.py").write_text(
        "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('ACCELERATE_')}))"
    )
    done = python("-m", "accelerate.commands.launch", "--config_file", "mp.yaml", *options, "show.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ACCELERATE_MIXED_PRECISION") == 1, "one process"
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


def refused(tmp_path: Path, config: str) -> str:
    """The error of the real `accelerate launch` for a config that it refuses."""
    (tmp_path / "mp.yaml").write_text(config)
    (tmp_path / "show.py").write_text("print('started')")
    done = python("-m", "accelerate.commands.launch", "--config_file", "mp.yaml", "show.py", cwd=tmp_path)
    assert done.returncode != 0 and "started" not in done.stdout
    return done.stderr


def test_behaviour_of_the_wizards_keys(tmp_path: Path) -> None:
    """The claim of MPG801, observed: the wizard's key gets a name that is never read."""
    config = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: fp8\nuse_cpu: true\n"
        "num_processes: 1\nfp8_config:\n  backend: AO\n  {key}: 16\n"
    )
    variables = exported(tmp_path, config.format(key="amax_history_length"))
    assert variables["ACCELERATE_FP8_AMAX_HISTORY_LENGTH"] == "16"
    assert variables.get("ACCELERATE_FP8_AMAX_HISTORY_LEN") != "16"
    variables = exported(tmp_path, config.format(key="amax_history_len"))
    assert variables["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "16"


@pytest.mark.parametrize(
    ("kind", "value"), [("MULTI_CPU", "True"), ("FSDP", None), ("DEEPSPEED", None), ("MULTI_GPU", None)]
)
def test_behaviour_of_use_cpu(tmp_path: Path, kind: str, value: str | None) -> None:
    """The claim of MPG811, observed: only the single-process launcher passes `use_cpu` on, and MULTI_CPU is one."""
    processes = 2 if kind == "MULTI_CPU" else 1
    variables = exported(
        tmp_path,
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nmixed_precision: 'no'\nuse_cpu: true\n"
        f"num_machines: 1\nnum_processes: {processes}\nmain_process_port: 0\n",
    )
    assert variables.get("ACCELERATE_USE_CPU") == value


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("distributed_type: 'NO'\nmixed_precision: no\n", "'bool' object has no attribute 'lower'"),
        ("distributed_type: NO\nmixed_precision: bf16\n", "You need to manually pass in `--num_processes`"),
        (
            "distributed_type: 'NO'\nmixed_precision: bf16\ndynamo_config: {dynamo_backend: NO}\n",
            "'bool' object has no attribute 'upper'",
        ),
        ("distributed_type: 'NO'\nmixed_precision: bf16\nmixed_precission: bf16\n", "had unknown keys"),
        (
            "distributed_type: 'NO'\nmixed_precision: fp8\n"
            "fp8_config: {backend: TE, override_linear_precision: false}\n",
            "'bool' object is not subscriptable",
        ),
    ],
    ids=["MPG802", "MPG802 distributed_type", "MPG802 dynamo", "MPG813", "MPG813 override_linear_precision"],
)
def test_behaviour_of_what_the_launcher_refuses(tmp_path: Path, lines: str, message: str) -> None:
    assert message in refused(tmp_path, f"{lines}use_cpu: true\n")


def test_behaviour_of_options_in_the_place_of_an_unquoted_no(tmp_path: Path) -> None:
    """What MPG802 relies on, observed: the options take the place of the booleans, at every level."""
    config = (
        "distributed_type: 'NO'\nmixed_precision: no\nuse_cpu: true\nnum_processes: 1\n"
        "deepspeed_config: {mixed_precision: no}\ndynamo_config: {dynamo_backend: no}\n"
    )
    assert "'bool' object has no attribute 'lower'" in refused(tmp_path, config)
    variables = exported(tmp_path, config, "--mixed_precision", "bf16", "--dynamo_backend=eager")
    assert (variables["ACCELERATE_MIXED_PRECISION"], variables["ACCELERATE_DYNAMO_BACKEND"]) == ("bf16", "EAGER")


def test_behaviour_of_deepspeed_config_overriding(tmp_path: Path) -> None:
    """The claim of MPG804, observed: the section's key is in force, not the top level's."""
    variables = exported(
        tmp_path,
        "distributed_type: 'NO'\nmixed_precision: bf16\nuse_cpu: true\nnum_processes: 1\n"
        "deepspeed_config: {mixed_precision: fp16}\n",
    )
    assert variables["ACCELERATE_MIXED_PRECISION"] == "fp16"


def test_behaviour_of_backend_spellings(tmp_path: Path) -> None:
    """The claim of MPG813, observed: the launch takes any spelling, the worker stops."""
    variables = exported(
        tmp_path,
        "distributed_type: 'NO'\nmixed_precision: fp8\nuse_cpu: true\nnum_processes: 1\nfp8_config: {backend: te}\n",
    )
    assert variables["ACCELERATE_FP8_BACKEND"] == "te"
    code = "from accelerate import Accelerator; Accelerator(cpu=True).fp8_backend"
    done = python("-c", code, cwd=tmp_path, **variables)
    assert "'te' is not a valid FP8BackendType" in done.stderr


def test_behaviour_of_dynamo_under_deepspeed(tmp_path: Path) -> None:
    """What MPG801 and MPG401 say, seen: DeepSpeed's launcher hands no dynamo setting to the workers."""
    config = (
        "mixed_precision: bf16\nnum_processes: 1\nmain_process_port: 0\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
        "distributed_type: "
    )
    assert exported(tmp_path, config + "FSDP")["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert "ACCELERATE_DYNAMO_BACKEND" not in exported(tmp_path, config + "DEEPSPEED")


@pytest.mark.parametrize("on", [True, False])
def test_behaviour_of_torchao_with_low_memory_loading(tmp_path: Path, on: bool) -> None:
    """torchao refuses it, observed in a process that assumes a GPU."""
    code = f"""
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin as Plugin
import torch.distributed
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
plugin = Plugin(fsdp_version=2, cpu_ram_efficient_loading={on})
print("BUILT", Accelerator(mixed_precision="fp8", fsdp_plugin=plugin).distributed_type)
"""
    done = python("-c", code, cwd=tmp_path, ACCELERATE_FP8_BACKEND="AO")
    refused = "torchao with FSDP2 and cpu_ram_efficient_loading is not supported" in done.stderr
    assert refused is on, done.stderr
    assert ("BUILT" in done.stdout) is not on


def test_the_distributed_types_are_accelerates() -> None:
    tree = ast.parse((PACKAGE / "utils/dataclasses.py").read_text())
    members = next(
        [
            each.targets[0].id
            for each in node.body
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        ]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "DistributedType"
    )
    assert tuple(members) == DISTRIBUTED_TYPES


def test_dynamo_backends_are_those_of_accelerate() -> None:
    tree = ast.parse((PACKAGE / "utils/dataclasses.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DynamoBackend")
    values = [
        node.value.value for node in found.body if isinstance(node, ast.Assign) and ast.unparse(node.value)[0] == "'"
    ]
    assert tuple(value.lower() for value in values) == DYNAMO_BACKENDS
