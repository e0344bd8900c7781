"""One validator: what a program refuses in its config is reported by lint, explain, apply and launch alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from limits import seconds

from mpguard.cli import main
from mpguard.core.errors import MpguardError
from mpguard.document import parse, read, validation
from mpguard.document.ignored_keys import ignored
from mpguard.runtime.launch import launcher, preflight

BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_CPU",
    "mixed_precision": "bf16",
    "num_machines": "1",
    "num_processes": "2",
    "use_cpu": "true",
    "fp8_config": "{mpguard_recipe: bf16_mixed}",
}
#: Keys that replace those of BASE; None removes one. The clause that all three print.
REFUSED = [
    ({"num_processes": None, "num_procesess": "2"}, "`num_procesess`: accelerate has no such key", "`num_processes`"),
    ({"num_processes": "two"}, "`num_processes`: is two; a number from 1 is needed", ""),
    ({"num_processes": "0"}, "`num_processes`: is 0; a number from 1 is needed", ""),
    ({"num_machines": "'1'"}, "`num_machines`: is 1; a number from 1 is needed", ""),
    ({"distributed_type": "MULTI_GPUS"}, "`distributed_type`: accelerate has no `MULTI_GPUS`", "`MULTI_GPU`"),
    ({"use_cpu": "maybe"}, "`use_cpu`: is maybe; true or false is needed", ""),
    ({"dynamo_config": "{dynamo_backend: INDUCTER}"}, "`dynamo_config.dynamo_backend`: is INDUCTER", "`inductor`"),
    ({"main_process_port": "abc"}, "`main_process_port`: is abc; a whole number is needed", ""),
    (
        {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: two}"},
        "`fsdp_config.fsdp_version`: is two; it is 1 or 2", "",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: four}"},
        "`deepspeed_config.zero_stage`: is four; it is one of 0, 1, 2, 3", "",
    ),
    ({"machine_rank": "zero"}, "`machine_rank`: is zero; a whole number from 0 is needed", ""),
    ({"fsdp_config": "full"}, "`fsdp_config`: is full; a section is needed", ""),
    ({"dynamo_config": "inductor"}, "`dynamo_config`: is inductor; a section is needed", ""),
    ({"dynamo_config": "{dynamo_backend: no}"}, "`dynamo_config.dynamo_backend", "AttributeError"),
    (
        {"dynamo_config": "{use_fullgraph: maybe}"},
        "`dynamo_config.use_fullgraph`: is maybe; true or false is needed", "",
    ),
    (
        {"distributed_type": "FSDP", "fsdp_config": "{fsdp_auto_wrap_policy: TRANSFORMERS_WRAP}"},
        "`fsdp_config.fsdp_auto_wrap_policy`: is TRANSFORMERS_WRAP; did you mean", "`transformer_based_wrap`",
    ),
    (
        {"distributed_type": "FSDP", "fsdp_config": "{state_dict_type: SHARDED}"},
        "`fsdp_config.state_dict_type`: is SHARDED; ", "sharded_state_dict",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": "{gradient_clipping: one}"},
        "`deepspeed_config.gradient_clipping`: is one; a number is needed", "",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": "{offload_optimizer_device: disk}"},
        "`deepspeed_config.offload_optimizer_device`: is disk; it is one of none, cpu, nvme", "",
    ),
    (
        {"dynamo_config": "{dynamo_backend: INDUCTOR, dynamo_mode: max_autotune}"},
        "`dynamo_config.dynamo_mode`: is max_autotune; did you mean", "`max-autotune`",
    ),
    (
        {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2, reshard_after_forward: FULL_SHARD}"},
        "`fsdp_config.reshard_after_forward`: is FULL_SHARD; true or false is needed with FSDP2", "",
    ),
    (
        {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2, fsdp_sync_module_states: false}"},
        "`fsdp_config.fsdp_sync_module_states`: is false, and `fsdp_cpu_ram_efficient_loading` is not", "",
    ),
    ({"compute_environment": "LOCAL"}, "`compute_environment`: is LOCAL; did you mean", "`LOCAL_MACHINE`"),
    (
        {"distributed_type": "FSDP", "fsdp_config": "{auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: many}"},
        "`fsdp_config.min_num_params`: is many; a whole number is needed", "",
    ),
    (
        {
            "distributed_type": "DEEPSPEED", "num_machines": "2",
            "deepspeed_config": "{zero_stage: 2, deepspeed_multinode_launcher: pdhs}",
        },
        "`deepspeed_config.deepspeed_multinode_launcher`: is pdhs; did you mean", "`pdsh`",
    ),
    ({"num_machines": "2", "same_network": "maybe"}, "`same_network`: is maybe; true or false is needed", ""),
    ({"num_machines": "2", "machine_rank": "2"}, "`machine_rank`: is 2, and `num_machines` is 2: the ranks", ""),
    ({"rdzv_backend": "c10"}, "`rdzv_backend`: is c10; did you mean", "`c10d`"),
    ({"gpu_ids": "0"}, "`gpu_ids`: is 0; text is needed, all or ids with commas between them: '0,1'", ""),
    ({"gpu_ids": "0;1"}, "`gpu_ids`: is 0;1; text is needed", ""),
    (
        {"distributed_type": "MULTI_GPU", "gpu_ids": "'1'"},
        "`gpu_ids`: is 1, one GPU, and MULTI_GPU needs two or more", "",
    ),
    ({"enable_cpu_affinity": "maybe"}, "`enable_cpu_affinity`: is maybe; true or false is needed", ""),
    (
        {"mixed_precision": "fp8", "fp8_config": "{mpguard_recipe: bf16_mixed, override_linear_precision: true}"},
        "`fp8_config.override_linear_precision`: is true; a list of three is needed", "",
    ),
    (
        {"parallelism_config": "{parallelism_config_cp_size: two}"},
        "`parallelism_config.parallelism_config_cp_size`: is two; a number from 1 is needed", "",
    ),
    (
        {"parallelism_config": "{parallelism_config_cp_size: 2, parallelism_config_cp_comm_strategy: all_gather}"},
        "`parallelism_config.parallelism_config_cp_comm_strategy`: is all_gather; did you mean", "`allgather`",
    ),
    (
        {
            "distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}",
            "parallelism_config": "{parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}",
        },
        "`parallelism_config`: its sizes make 8 processes, and `num_processes` is 2", "",
    ),
    (
        {
            "distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}",
            "parallelism_config": "{parallelism_config_tp_size: 2}",
        },
        "`parallelism_config`: FSDP has nothing to shard over", "",
    ),
    ({"fp8_config": "{mpguard_recipe: bf16_mixd}"}, "mpguard_recipe`: there is no recipe `bf16_mixd`", "`bf16_mixed`"),
    ({"fp8_config": "{mpguard_recipe: [bf16_mixed]}"}, "mpguard_recipe`: is [bf16_mixed]; the name of a recipe", ""),
    (
        {"fp8_config": "{mpguard_recipe: bf16_mixed, mpguard_overrides: {params_dtype: fp31}}"},
        "mpguard_overrides`: `fp31` is not a dtype", "`fp32`",
    ),
    (
        {"fp8_config": "{mpguard_recipe: bf16_mixed, mpguard_overrides: {fp16: true}}"},
        "mpguard_overrides`: bf16 and fp16 are both True", "",
    ),
    (
        {"fp8_config": "{mpguard_recipe: bf16_mixed, mpguard_overrides: params_dtype}"},
        "mpguard_overrides`: is params_dtype; a section is needed", "",
    ),
    ({"fp8_config": "{mpguard_recpie: bf16_mixed}"}, "mpguard_recpie`: ", "`mpguard_recipe`"),
    ({"fp8_config": "{mpguard_recipe: bf16_mixed, mpguard_overide: {}}"}, "mpguard_overide`: ", "mpguard_overrides"),
]  # fmt: skip


def write(folder: Path, changes: dict[str, str | None]) -> Path:
    lines = [f"{key}: {value}" for key, value in {**BASE, **changes}.items() if value is not None]
    path = folder / "mp.yaml"
    path.write_text("\n".join(lines) + "\n")
    (folder / "train.py").write_text("from accelerate import Accelerator\n\naccelerator = Accelerator()\n")
    return path


@pytest.mark.parametrize(("changes", "clause", "meant"), REFUSED)
def test_launch_explain_and_lint_refuse_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | None],
    clause: str,
    meant: str,
) -> None:
    pytest.importorskip("accelerate", reason="launch compares its version")
    path = write(tmp_path, changes)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MpguardError) as refused:
        preflight.check_named_config(["--config", str(path), "train.py"])
    assert main(["explain", "mp.yaml", "train.py"]) == 1
    explained = capsys.readouterr().err
    assert main(["lint", "--no-cache", "--isolated", "mp.yaml"]) == 1
    linted = capsys.readouterr().out
    for text in (str(refused.value), explained):
        assert clause in text and meant in text
    assert clause.partition("`: ")[0] in linted and meant in linted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"distributed_type": "NO", "num_processes": "1"},
        {"num_processes": "${GPUS}"},
        {"num_processes": None, "num_machines": None},
        {"tpu_env": "[]", "main_process_port": "29500", "machine_rank": "'0'", "fsdp_config": "{}"},
        {"mixed_precision": "BF16", "dynamo_config": "{dynamo_backend: 'NO', dynamo_use_dynamic: 'no'}"},
        {
            "distributed_type": "FSDP",
            "fsdp_config": "{fsdp_version: 1, fsdp_sharding_strategy: 1, fsdp_state_dict_type: full_state_dict,"
            " fsdp_backward_prefetch: NO_PREFETCH, fsdp_reshard_after_forward: SHARD_GRAD_OP}",
        },
        {"distributed_type": "DEEPSPEED", "deepspeed_config": "{gradient_clipping: auto, zero3_init_flag: true}"},
        {"gpu_ids": "all", "rdzv_backend": "my_own_store", "enable_cpu_affinity": "'true'", "debug": "false"},
        {"distributed_type": "MULTI_GPU", "gpu_ids": "'0, 1'", "rdzv_backend": "etcd-v2"},
        {"distributed_type": "MULTI_GPU", "gpu_ids": "GPU-5f3a,MIG-7/1/0", "num_machines": "1"},
        {"dynamo_config": "{dynamo_backend: EAGER, dynamo_mode: anything}"},
        {"dynamo_config": "{dynamo_backend: INDUCTOR, dynamo_mode: max-autotune-no-cudagraphs}"},
        {"mixed_precision": "fp8", "fp8_config": "{backend: TE, override_linear_precision: [false, false, true]}"},
        {"mixed_precision": "bf16", "fp8_config": "{backend: TE, margin: unread, opt_level: unread}"},
        {
            "distributed_type": "FSDP",
            "num_processes": "8",
            "fsdp_config": "{fsdp_version: 2, fsdp_reshard_after_forward: 'true', fsdp_sharding_strategy: unread,"
            " sync_module_states: false, cpu_ram_efficient_loading: false}",
            "parallelism_config": "{parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2,"
            " parallelism_config_cp_backend: torch}",
        },
    ],
)
def test_configs_that_can_be_launched_have_no_problem(tmp_path: Path, changes: dict[str, str | None]) -> None:
    document = parse(write(tmp_path, changes).read_text(), "mp.yaml")
    assert not list(validation.problems(document)) and not list(validation.own_problems(document))


#: Values of FP8 that the workers cannot parse, and that a policy replaces.
REPLACED = {
    "{backend: MSAMP, opt_level: 02}": "`fp8_config.opt_level`: is 2; it is one of O1, O2",
    "{backend: TE, margin: lots}": "`fp8_config.margin`: is lots; a whole number is needed",
    "{backend: TE, amax_compute_algo: maximum}": "`fp8_config.amax_compute_algo`: is maximum; did you mean `max`?",
    "{override_linear_precision: '(no, no, no)'}": "`fp8_config.override_linear_precision`: is (no, no, no); a list",
    "{backend: AO, pad_inner_dim: maybe}": "`fp8_config.pad_inner_dim`: is maybe; true or false is needed",
}


@pytest.mark.parametrize("section", REPLACED)
def test_fp8_values_stop_a_stock_run_alone(tmp_path: Path, section: str) -> None:
    stock = {"mixed_precision": "fp8", "fp8_config": section}
    document = parse(write(tmp_path, stock).read_text(), "mp.yaml")
    (problem,) = validation.problems(document)
    assert REPLACED[section] in problem.message(document) and problem.flag == "mixed_precision"
    path = write(tmp_path, {**stock, "fp8_config": section.replace("{", "{mpguard_recipe: bf16_mixed, ")})
    preflight.check_named_config(["--config", str(path), "train.py"])


AXOLOTL = "base_model: m\ndatasets:\n  - path: d\n    type: alpaca\ntorch_compile: true\n"
FACTORY = "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2%s}'
NEMO = "trainer:\n  precision: bf16\nmodel:\n  megatron_amp_O2: true\n  transformer_engine: true\n"
FP8 = AXOLOTL + "bf16: true\nfp8: true\n"
#: name of the file -> text, a recipe that leaves the problem in it, the clause that apply, explain and lint print.
TRAINERS = {
    "a key of fp8_config": (
        FP8 + "fp8_config:\n  recipee: rowwise\n", "bf16_with_fp8_rowwise_mixed",
        "`fp8_config.recipee`: axolotl 0.19.0 has no such key, and stops; did you mean `recipe`?",
    ),
    "the all-gather in fp8_config": (
        FP8 + "fp8_config:\n  fp8_enable_fsdp_float8_all_gather: true\n", "hopper_bf16_with_fp8_mixed",
        "`fp8_config.fp8_enable_fsdp_float8_all_gather`: axolotl 0.19.0 has no such key, and stops",
    ),
    "norms without FSDP2": (
        AXOLOTL + "bf16: true\nfp32_norms: true\n", "bf16_mixed",
        "`fp32_norms`: axolotl stops without FSDP2, `fsdp_version: 2` with an `fsdp_config`",
    ),
    "a section of DeepSpeed": (
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabeld": true}}',
        "bf16_mixed", "`bf16.enabeld`: DeepSpeed has no such key, and stops; did you mean `enabled`?",
    ),
    "the long name of a dtype": (
        DEEPSPEED % ', "seq_parallel_communication_data_type": "float32"', "fp32",
        "`seq_parallel_communication_data_type`: is float32; did you mean",
    ),
    "a key of ZeRO": (
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, "overlap_com": true}}', "bf16_mixed",
        "`zero_optimization.overlap_com`: DeepSpeed has no such key, and stops; did you mean `overlap_comm`?",
    ),
    "a stage of ZeRO": (
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 5}}', "bf16_mixed",
        "`zero_optimization.stage`: is 5; it is one of 0, 1, 2, 3",
    ),
    "a switch of axolotl": (
        AXOLOTL + "bf16: true\nfp32_norms: maybe\n", "bf16_mixed", "`fp32_norms`: is maybe; true or false is needed",
    ),
    "a version of FSDP": (
        AXOLOTL + "bf16: true\nfsdp_version: two\n", "bf16_mixed", "`fsdp_version`: is two; a whole number is needed",
    ),
    "text for a switch of LLaMA-Factory": (
        FACTORY + "bf16: true\nupcast_layernorm: 'false'\n", "bf16_mixed",
        "`upcast_layernorm`: is the text \"false\"; true or false is needed: text counts as true",
    ),
    "a key of LLaMA-Factory": (
        FACTORY + "bf16: true\nupcast_layernrom: true\n", "bf16_mixed",
        "`upcast_layernrom`: LLaMA-Factory 0.9.5 has no such key, and stops; did you mean `upcast_layernorm`?",
    ),
    "the batch size as text": (
        DEEPSPEED.replace("2", '"four"') % "", "bf16_mixed",
        "`train_micro_batch_size_per_gpu`: is four; a number above 0 is needed",
    ),
    "clipping as text": (
        DEEPSPEED % ', "gradient_clipping": "1.0"', "bf16_mixed", "`gradient_clipping`: is 1.0; a number is needed",
    ),
    "a bucket of ZeRO": (
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}',
        "bf16_mixed", "`zero_optimization.reduce_bucket_size`: is large; a whole number from 0 is needed",
    ),
    "a section of DeepSpeed in axolotl": (
        AXOLOTL + "bf16: true\ndeepspeed:\n  bf16: {enabled: false}\n  zero_optimization: {stage: 2}\n", "bf16_mixed",
        "`bf16`: bf16 is true for the Trainer, and `bf16.enabled` is false in the section `deepspeed`",
    ),
    "a key in that section": (
        AXOLOTL + "bf16: true\ndeepspeed:\n  bf16: {enabled: auto, foo: 1}\n  zero_optimization: {stage: 2}\n",
        "bf16_mixed", "`deepspeed.bf16.foo`: DeepSpeed has no such key, and stops; remove it",
    ),
    "a section of DeepSpeed in LLaMA-Factory": (
        FACTORY + "bf16: true\ndeepspeed: {bf16: {enabled: auto}, zero_optimization: {stage: 5}}\n", "bf16_mixed",
        "`deepspeed.zero_optimization.stage`: is 5; it is one of 0, 1, 2, 3",
    ),
    "text for a number of NeMo": (
        NEMO + "  fp8_amax_history_len: '1024'\n", "bf16_mixed",
        "`model.fp8_amax_history_len`: is 1024; a whole number without quotes is needed",
    ),
    "the algorithm of NeMo": (
        NEMO + "  fp8_amax_compute_algo: maximum\n", "bf16_mixed",
        "`model.fp8_amax_compute_algo`: is maximum; did you mean `max`?",
    ),
    "a key of accelerate": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\n"
        "num_procesess: 2\nuse_cpu: true\n",
        "bf16_mixed", "`num_procesess`: accelerate has no such key; did you mean `num_processes`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_program_refuses_is_left_neither_by_apply_nor_by_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, recipe, clause = TRAINERS[name]
    monkeypatch.chdir(tmp_path)
    path = Path("ds.json" if text.startswith("{") else "train.yaml")
    path.write_text(text)
    assert main(["explain", str(path)]) == 1
    assert clause in capsys.readouterr().err
    assert main(["lint", "--no-cache", "--isolated", str(path)]) == 1
    assert clause.partition(":")[0] in capsys.readouterr().out
    for options in ([], ["--check"]):
        assert main(["apply", *options, recipe, str(path)]) == 1
        shown = capsys.readouterr().out
        assert f"problem: {path}:" in shown and clause in shown and "matches" not in shown


DATA_TYPES = (
    '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true},'
    ' "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"%s}%s}'
)
#: name -> text, the key that is ignored while the run goes on, and the clause of explain, apply and launch.
IGNORED = {
    "a key of data_types": (
        DATA_TYPES % (', "grad_acum_dtype": "fp32"', ""), "data_types.grad_acum_dtype",
        "DeepSpeed 0.19.8 has no such key, and ignores it; did you mean `grad_accum_dtype`?",
    ),
    "a section of a newer DeepSpeed": (
        DATA_TYPES % ("", ', "mxfp8": {"enabled": true}'), "mxfp8", "DeepSpeed 0.19.8 has no such key, and ignores it",
    ),
    "a dtype of a newer DeepSpeed": (
        DATA_TYPES % (', "optimizer_dtype": "bf16"', ""), "data_types.optimizer_dtype",
        "DeepSpeed 0.19.8 has no such key, and ignores it",
    ),
    "a key of a newer accelerate": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\nuse_cpu: true\n"
        "fp8_config:\n  mpguard_recipe: bf16_mixed\n  amax_rounding_fp4: 2\n",
        "fp8_config.amax_rounding_fp4", "accelerate 1.15.0 has no such key, and ignores it",
    ),
    "two modes of axolotl": (AXOLOTL + "bf16: true\nfp16: true\n", "fp16", "`bf16` is true as well, and wins"),
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_a_key_that_is_ignored_never_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, key, clause = IGNORED[name]
    monkeypatch.chdir(tmp_path)
    path = Path("ds.json" if text.startswith("{") else "mp.yaml")
    path.write_text(text)
    document = parse(text, str(path))
    assert [(each.key, each.reason) for each in ignored(document)] == [(key, clause)]
    main(["explain", str(path)])
    assert key in capsys.readouterr().out.partition("nothing reads")[2]
    main(["apply", "bf16_mixed", "--check", str(path)])
    shown = capsys.readouterr().out
    assert "matches" not in shown and (clause in shown or f"{key}: true -> (removed)" in shown)
    if document.kind == "accelerate":
        assert [f"mp.yaml:7: `{key}`: {clause}"] == list(preflight.ignored_keys(document))


def test_a_launch_reports_what_is_ignored_in_the_deepspeed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(IGNORED["a key of data_types"][0])
    changes: dict[str, str | None] = {
        "distributed_type": "DEEPSPEED", "deepspeed_config": "{deepspeed_config_file: ds.json}",
    }  # fmt: skip
    (line,) = preflight.ignored_keys(read(write(tmp_path, changes)))
    assert "ds.json:1: `data_types.grad_acum_dtype`: DeepSpeed 0.19.8 has no such key, and ignores it" in line


OFFLOADED = DATA_TYPES.replace('"stage": 1', '"stage": 1, "offload_param": {"device": "cpu"}') % ("", "")
SECTION = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_param_device: %s\n"
HEAD = "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (OFFLOADED, "zero_optimization.offload_param.device"),
        (HEAD + SECTION % "cpu", "deepspeed_config.offload_param_device"),
    ],
)
def test_what_is_offloaded_without_effect_is_reported_and_refused_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    clause = "ignores it: parameters are offloaded at stage 3 alone"
    path = Path("ds.json" if text.startswith("{") else "mp.yaml")
    path.write_text(text)
    assert [each.key for each in validation.without_effect(read(path))] == [key]
    assert main(["lint", "--no-cache", "--isolated", str(path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "warning [unknown-" in shown and f"`{key}`" in shown and clause in shown
    assert main(["explain", str(path)]) == 0
    assert key in capsys.readouterr().out.partition("nothing reads")[2]
    assert main(["apply", "bf16_mixed", str(path)]) == 0
    assert clause in " ".join(capsys.readouterr().out.split())
    launched = path
    if document_is_deepspeed := text.startswith("{"):
        launched = Path("mp.yaml")
        launched.write_text(HEAD + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    (line,) = (each for each in preflight.ignored_keys(read(launched)) if "stage 3 alone" in each)
    assert line.startswith(f"{'ds.json' if document_is_deepspeed else 'mp.yaml'}:")
    preflight.check_config(read(launched), ())


def test_what_is_offloaded_to_no_device_is_not_reported() -> None:
    assert list(validation.without_effect(parse(HEAD + SECTION % "none", "mp.yaml"))) == []


@pytest.mark.parametrize(
    ("kind", "more", "missing"),
    [
        ("'NO'", {}, ["main_process_ip", "main_process_port"]),
        ("MULTI_CPU", {}, ["main_process_ip"]),
        ("MULTI_GPU", {}, ["main_process_ip"]),
        ("MULTI_GPU", {"main_process_ip": "10.0.0.1"}, []),
        ("DEEPSPEED", {"deepspeed_config": "{zero_stage: 2}"}, []),  # pdsh takes it from its file of hosts
        ("DEEPSPEED", {"deepspeed_config": "{deepspeed_multinode_launcher: standard}"}, ["main_process_ip"]),
    ],
)
def test_the_address_of_the_first_machine_is_given_by_the_config_or_a_flag(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    more: dict[str, str | None],
    missing: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, {"distributed_type": kind, "num_machines": "2", "use_cpu": None, **more})
    document = read(path)
    found = [each.message(document) for each in validation.problems(document)]
    assert [each.split("no `")[1].split("`")[0] for each in found] == missing
    assert main(["lint", "--no-cache", "--isolated", str(path)]) == 0  # a flag that no file shows may give it
    main(["explain", "mp.yaml", "train.py"])
    explained = capsys.readouterr().err
    assert all(f"no `{key}` is given" in explained for key in missing) and ("no `main" in explained) == bool(missing)
    if missing:
        with pytest.raises(MpguardError, match="no `main_process_ip` is given"):
            preflight.check_config(document, ())
    for flags in (missing, ["num_machines"]):
        preflight.check_config(document, flags)
    words = [word for key in missing for word in (f"--{key}", "29500")]
    if kind.startswith("MULTI"):  # what mpguard starts for these kinds is torchrun
        monkeypatch.setattr(launcher, "has_accelerator", lambda: True)
        parser = pytest.importorskip("accelerate.commands.launch").launch_command_parser
        assert launcher.prepare(["--config", "mp.yaml", *words, "train.py"], parser) is not None


def test_a_flag_replaces_the_boolean_of_a_backend(tmp_path: Path) -> None:
    path = write(tmp_path, {"dynamo_config": "{dynamo_backend: no}"})
    preflight.check_named_config(["--dynamo_backend", "no", f"--config={path}", "train.py"])


def test_a_problem_that_a_recipe_removes_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(FP8 + "fp8_config:\n  recipee: rowwise\n")
    assert main(["apply", "bf16_mixed", str(path)]) == 0
    assert "problem:" not in capsys.readouterr().out and "fp8" not in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        FP8 + "fp8_config:\n  recipe: ${RECIPE}\n",
        FP8 + "fp8_config:\n  recipe: rowwise_with_gw_hp\n",
        AXOLOTL + "bf16: ${BF16}\n",
        FP8 + "fp8_enable_fsdp_float8_all_gather: true\nfsdp_config:\n  fsdp_version: 2\n",
        "mixed_precision: ${recipe}\nmodel:\n  seq_length: 1\ntrain:\n  train_iters: 2\n",
        "mixed_precision:\n  _target_: a.B\n  bf16: true\nmodel:\n  seq_length: 1\ntrain:\n  train_iters: 2\n",
    ],
)
def test_what_a_program_may_accept_is_no_problem(text: str) -> None:
    document = parse(text, "train.yaml")
    assert document.kind in ("axolotl", "megatron-bridge") and list(validation.problems(document)) == []


@pytest.mark.parametrize(("value", "is_wrong"), [('"yes please"', True), ('"true"', False), ('"auto"', False)])
def test_text_for_torch_autocast_counts_as_true(value: str, is_wrong: bool) -> None:
    document = parse('{"train_batch_size": 2, "torch_autocast": {"enabled": %s}}' % value, "ds.json")  # noqa: UP031
    assert [each.key for each in validation.problems(document)] == ["torch_autocast.enabled"] * is_wrong


def test_a_flag_replaces_the_number_of_the_config(tmp_path: Path) -> None:
    path = write(tmp_path, {"num_processes": "two"})
    preflight.check_named_config(["--num_processes", "2", f"--config={path}", "train.py"])
    preflight.check_named_config(["train.py", "--config", str(path)])  # an argument of the script
    with pytest.raises(MpguardError, match="no --config is given"):
        preflight.check_named_config(["--num_processes", "2", "train.py", "--lr", "3"])


def test_errors_of_the_config_come_before_torch_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="launch needs it")
    path = write(tmp_path, {"num_procesess": "2"})
    code = (
        "import sys; from mpguard.cli import main\n"
        f"status = main(['launch', '--config', {str(path)!r}, 'train.py'])\n"
        "assert status == 2 and not {'torch', 'accelerate'} & set(sys.modules), sorted(sys.modules)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds(60), check=False, cwd=tmp_path)
    assert done.returncode == 0 and "did you mean `num_processes`" in done.stderr, done.stderr
