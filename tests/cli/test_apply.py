"""`mpguard apply`: the policy in files that people wrote."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from limits import seconds

import mpguard
from mpguard import targets
from mpguard.cli import main
from mpguard.core import text_edits
from mpguard.document import mp_yaml, read
from mpguard.policy import hardware

REASON = "configs are read by accelerate itself"
load_config_from_file = pytest.importorskip(
    "accelerate.commands.config.config_args", reason=REASON
).load_config_from_file

YAML = """\
# our cluster
compute_environment: LOCAL_MACHINE   # keep
distributed_type: DEEPSPEED
mixed_precision: fp16  # old
num_processes: 2
deepspeed_config:
  zero_stage: 2 # two
  mixed_precision: fp16
"""
JSON = """\
{
  "zero_optimization": {"stage": 2},
  "fp16": {"enabled": true, "loss_scale": 0},
  "train_micro_batch_size_per_gpu": 1
}
"""
AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: mhenrichsen/alpaca_2k_test   # ours
    type: alpaca
bf16: false
fp16: true
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mp.yaml").write_text(YAML)
    Path("ds.json").write_text(JSON)
    return tmp_path


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}


def test_the_policy_is_in_the_files_and_the_rest_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 0
    assert Path("mp.yaml").read_text() == YAML.replace("fp16  # old", "bf16  # old").replace(
        "  mixed_precision: fp16\n", "fp8_config:\n  mpguard_recipe: bf16_mixed\n"
    )
    policy = mpguard.recipe("bf16_mixed")
    assert mp_yaml.load_policy(Path("mp.yaml")) == policy
    assert targets.differences(json.loads(Path("ds.json").read_text()), policy, "deepspeed") == []
    assert load_config_from_file("mp.yaml").mixed_precision == "bf16"
    out = capsys.readouterr().out
    assert "mp.yaml  fp8_config.mpguard_recipe: (absent) -> bf16_mixed" in out
    assert "mixed_precision: fp16 -> bf16" in out
    assert "deepspeed_config.mixed_precision: fp16 -> (removed)" in out
    assert "ds.json  bf16.enabled: (absent) -> true" in out and "fp16.enabled: true -> false" in out
    assert "2 files changed, " in out


def test_deepspeed_accepts_the_result() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    assert main(["apply", "bf16_mixed", "ds.json"]) == 0
    config = DeepSpeedConfig(json.loads(Path("ds.json").read_text()))
    assert config.bfloat16_config.enabled and not config.float16_config.enabled


def test_twice_is_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 0
    before = contents()
    stamps = [path.stat().st_mtime_ns for path in Path().iterdir()]
    capsys.readouterr()
    assert main(["apply", "bf16-mixed", "mp.yaml", "ds.json"]) == 0
    assert contents() == before and [path.stat().st_mtime_ns for path in Path().iterdir()] == stamps
    assert capsys.readouterr().out == "mp.yaml  matches bf16_mixed\nds.json  matches bf16_mixed\n"


def test_check_writes_nothing_and_says_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    before = contents()
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json", "--check"]) == 1
    assert contents() == before
    assert "2 files differ from bf16_mixed, " in capsys.readouterr().out
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 0
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json", "--check"]) == 0
    assert main(["apply", "fp32", "ds.json", "mp.yaml", "--check"]) == 1


@pytest.mark.parametrize(
    "text", [YAML, YAML.replace("\n", "\r\n"), YAML.rstrip("\n")], ids=["LF", "CRLF", "no last line break"]
)
def test_diff_writes_nothing_and_prints_what_git_takes(text: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    Path("mp.yaml").write_bytes(text.encode())
    before = contents()
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json", "--diff"]) == 0
    assert contents() == before
    diff = capfdbinary.readouterr().out
    assert diff.startswith(b"--- mp.yaml\n+++ mp.yaml\n@@")
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 0
    after = contents()
    for name, data in before.items():
        Path(name).write_bytes(data)
    subprocess.run(["git", "apply", "-p0", "-"], input=diff, check=True, timeout=seconds(60))
    assert contents() == after


def test_diff_with_check_says_by_its_status() -> None:
    assert main(["apply", "bf16_mixed", "mp.yaml", "--diff", "--check"]) == 1


def test_mode_links_and_line_endings_are_kept() -> None:
    Path("mp.yaml").write_bytes(b"\xef\xbb\xbf" + YAML.replace("\n", "\r\n").encode())
    Path("mp.yaml").chmod(0o640)
    Path("link.yaml").symlink_to("mp.yaml")
    assert main(["apply", "bf16_mixed", "link.yaml", "mp.yaml"]) == 0
    assert Path("link.yaml").is_symlink()
    assert Path("mp.yaml").stat().st_mode & 0o777 == 0o640
    data = Path("mp.yaml").read_bytes()
    assert data.startswith(b"\xef\xbb\xbf# our") and data.count(b"\n") == data.count(b"\r\n")


def test_axolotl_is_recognised_by_its_content() -> None:
    Path("config.txt").write_text(AXOLOTL)
    assert main(["apply", "bf16_mixed", "config.txt"]) == 0
    text = Path("config.txt").read_text()
    assert "# ours" in text and "fp16: true" not in text
    assert targets.differences(yaml.safe_load(text), mpguard.recipe("bf16_mixed"), "axolotl") == []


def test_precision_is_said_once_where_the_yaml_names_a_deepspeed_file(capsys: pytest.CaptureFixture[str]) -> None:
    """accelerate refuses `mixed_precision` together with `deepspeed_config_file` (S25)."""
    text = YAML.replace("  zero_stage: 2 # two\n  mixed_precision: fp16\n", "  deepspeed_config_file: ds.json\n")
    Path("mp.yaml").write_text(text)
    assert main(["apply", "bf16_mixed", "mp.yaml"]) == 0
    assert "the precision is set in ds.json too; pass that file to `mpguard apply`" in capsys.readouterr().out
    Path("mp.yaml").write_text(text)
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 0
    assert "pass that file" not in capsys.readouterr().out
    assert "mixed_precision" not in read(Path("mp.yaml")).require()
    assert json.loads(Path("ds.json").read_text())["bf16"] == {"enabled": True}


@pytest.mark.parametrize("name", ["none", "''", "3"])
def test_a_yaml_that_names_no_deepspeed_file_says_nothing_of_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """accelerate writes `none` for no file."""
    Path("mp.yaml").write_text(
        f"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {{deepspeed_config_file: {name}}}\n"
    )
    assert main(["apply", "bf16_mixed", "mp.yaml"]) == 0
    assert "pass that file" not in capsys.readouterr().out


def test_overrides_of_the_same_recipe_are_part_of_the_policy_of_both_files() -> None:
    Path("mp.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
        "fp8_config:\n  mpguard_recipe: bf16_mixed\n  mpguard_overrides: {grad_reduce_in_fp32: false}\n"
    )
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 0
    assert mp_yaml.load_policy(Path("mp.yaml")).grad_reduce_in_fp32 is False
    assert "communication_data_type" not in json.loads(Path("ds.json").read_text())
    assert main(["apply", "fp16_mixed", "mp.yaml", "ds.json"]) == 0
    assert mp_yaml.load_policy(Path("mp.yaml")) == mpguard.recipe("fp16_mixed")


@pytest.mark.parametrize("recipe", ["bf16_mixed", "fp16_mixed", "fp32", "tf32", "hopper_bf16_with_fp8_mixed"])
@pytest.mark.parametrize("kind", ["'NO'", "MULTI_GPU", "FSDP", "DEEPSPEED"])
def test_accelerate_accepts_the_result(recipe: str, kind: str) -> None:
    Path("mp.yaml").write_text(f"distributed_type: {kind}\nmixed_precision: 'no'\nnum_processes: 1\n")
    assert main(["apply", recipe, "mp.yaml"]) == 0
    assert load_config_from_file("mp.yaml").fp8_config["mpguard_recipe"] == recipe
    assert mp_yaml.load_policy(Path("mp.yaml")) == mpguard.recipe(recipe)


def test_a_policy_that_no_part_of_the_run_carries_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A wish of the recipe is not: `fp4_param` is one until an override demands it."""
    assert main(["apply", "bf16_with_nvfp4_mixed", "mp.yaml"]) == 0
    name = "mpguard_recipe: bf16_with_nvfp4_mixed"
    text = Path("mp.yaml").read_text()
    Path("mp.yaml").write_text(text.replace(name, f"{name}\n  mpguard_overrides: {{fp4_param: true}}"))
    capsys.readouterr()
    before = contents()
    assert main(["apply", "bf16_with_nvfp4_mixed", "mp.yaml"]) == 2
    assert "fp4_param=True" in capsys.readouterr().err and contents() == before


BAD = {
    "tag.yaml": (b"distributed_type: !!python/object/apply:os.system ['touch executed']\n", "tag.yaml:1: the tag"),
    "twice.yaml": (YAML.encode() + b"mixed_precision: bf16\n", "twice.yaml:9: `mixed_precision` is a duplicate key"),
    "latin.yaml": (YAML.replace("our", "für").encode("latin-1"), "latin.yaml:1: is not UTF-8"),
    "nul.yaml": (YAML.encode() + b"\0", "nul.yaml:9: a NUL byte"),
    "empty.yaml": (b"", "empty.yaml: is empty"),
    "broken.json": (b'{"fp16": {"enabled": true},}', "broken.json:1: invalid JSON: a comma before `}`"),
    "package.json": (b'{"name": "x"}', "package.json: is no config of accelerate, DeepSpeed, axolotl, LLaMA-Factory"),
    "key.yaml": (YAML.encode() + b"fp8_config: {mpguard_recpe: fp32}\n", "key.yaml:9: `fp8_config.mpguard_recpe`: "),
    "section.yaml": (YAML.encode() + b"fp8_config: TE\n", "section.yaml:9: `fp8_config`: is TE; a section is needed"),
    "anchor.yaml": (YAML.replace("fp16  #", "&p fp16  #").encode() + b"x: *p\n", "anchor.yaml:9: "),
    "train.py": (b"import torch\n\nmodel = {'a': 1}: 2\n", "train.py: is not a config; a YAML or JSON file is needed"),
    "deep.yaml": (b"a: " + b"[" * 10_000, "deep.yaml:1: nested more than 100 levels deep"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_changed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The valid file is not changed either, in any order."""
    Path(name).write_bytes(BAD[name][0])
    before = contents()
    assert main(["apply", "bf16_mixed", "ds.json", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mpguard: ") and BAD[name][1] in err
    assert contents() == before and not Path("executed").exists()


def test_all_bad_files_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("twice.yaml", "empty.yaml"):
        Path(name).write_bytes(BAD[name][0])
    assert main(["apply", "bf16_mixed", "twice.yaml", "empty.yaml", "nothing.yaml"]) == 2
    assert "nothing.yaml: cannot be read" in capsys.readouterr().err
    assert main(["apply", "bf16_mixed", "twice.yaml", "empty.yaml"]) == 2
    err = capsys.readouterr().err
    assert "twice.yaml:9" in err and "empty.yaml: is empty" in err


def test_an_unknown_recipe_names_the_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "bf16_mixd", "mp.yaml"]) == 2
    assert "did you mean `bf16_mixed`" in capsys.readouterr().err


def test_what_was_written_is_put_back_when_a_later_file_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents()
    real = text_edits.write_atomically

    def full(path: Path, data: bytes) -> None:
        if path.name == "ds.json":
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr("mpguard.cli.apply.write_atomically", full)
    assert main(["apply", "bf16_mixed", "mp.yaml", "ds.json"]) == 2
    assert "ds.json: cannot be written: No space left on device. Nothing was changed" in capsys.readouterr().err
    assert contents() == before


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "bf16_mixed", "mp.yaml", "--check", "--format", "json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["version"], facts["recipe"], facts["written"]) == (1, "bf16_mixed", False)
    (file,) = facts["files"]
    assert (file["path"], file["kind"], file["strategy"]) == ("mp.yaml", "accelerate", "deepspeed-zero2")
    changes = {change.pop("key"): change for change in file["changes"]}
    assert changes["mixed_precision"] == {"old": "fp16", "new": "bf16", "why": ""}
    assert "old" not in changes["fp8_config.mpguard_recipe"]
    assert "new" not in changes["deepspeed_config.mixed_precision"]


AXOLOTL_FSDP2 = """\
base_model: model
datasets:
  - path: data
bf16: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
"""


@pytest.mark.parametrize("recipe", ["bf16_mixed", "bf16_full", "hopper_bf16_with_fp8_mixed"])
def test_what_axolotl_cannot_carry_is_reported_and_not_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("axolotl.yml").write_text(AXOLOTL_FSDP2)
    assert main(["apply", recipe, "axolotl.yml"]) == 0
    assert "note: this file has no setting for grad_reduce_in_fp32=True" in capsys.readouterr().out
    assert main(["apply", "--check", "--override", "grad_reduce_in_fp32=false", recipe, "axolotl.yml"]) == 0
    assert "grad_reduce_in_fp32" not in capsys.readouterr().out, "accelerate's FSDP reduces in BF16 by itself"


def test_a_refusal_names_what_axolotl_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The override and the recipes that the messages name are applied as they are named."""
    Path("axolotl.yml").write_text(AXOLOTL_FSDP2)
    assert main(["apply", "bf16_with_fp8_current_scaling_mixed", "axolotl.yml"]) == 2
    error = capsys.readouterr().err
    override = error.partition("To go without: ")[2].split()
    assert override == ["--override", "first_last_layers_bf16=false"], error
    assert main(["apply", *override, "bf16_with_fp8_current_scaling_mixed", "axolotl.yml"]) == 0
    assert main(["apply", "bf16_with_mxfp8_mixed", "axolotl.yml"]) == 2
    named = capsys.readouterr().err.rpartition("Use the recipe ")[2].split()[::2]
    assert len(named) == 2
    for recipe in named:
        assert main(["apply", recipe, "axolotl.yml"]) == 0, recipe


def test_overrides_of_the_command_line_are_stored_in_an_accelerate_config(capsys: pytest.CaptureFixture[str]) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
    Path("mp.yaml").write_text(text)
    assert main(["apply", "--override", "grad_reduce_in_fp32=false", "bf16_mixed", "mp.yaml"]) == 0
    found = yaml.safe_load(Path("mp.yaml").read_text())["fp8_config"]
    assert found == {"mpguard_recipe": "bf16_mixed", "mpguard_overrides": {"grad_reduce_in_fp32": False}}
    for words, line in (
        (["--override", "grad_reduce_in_fp32"], "FIELD=VALUE is needed"),
        (["--override", "grad_reduce=false"], "a policy has no field `grad_reduce`; did you mean"),
        (["--override", "fp16=true"], "bf16 and fp16 are both True"),
    ):
        assert main(["apply", *words, "bf16_mixed", "mp.yaml"]) == 2
        assert line in capsys.readouterr().err


@pytest.mark.parametrize("before", ["mixed_precision: fp16\n", "mixed_precision: 'no'\n", ""])
def test_auto_is_left_to_the_launch(before: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n{before}"
    Path("mp.yaml").write_text(text)
    assert main(["apply", "auto", "mp.yaml"]) == 0
    assert "each launch decides by its own GPU" in capsys.readouterr().out
    assert Path("mp.yaml").read_text() == text + "fp8_config:\n  mpguard_recipe: auto\n"
    assert main(["apply", "--check", "auto", "mp.yaml"]) == 0
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}')
    assert main(["apply", "--check", "auto", "ds.json"]) == 0


def test_auto_needs_a_gpu_for_a_trainer_that_mpguard_does_not_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("axolotl.yml").write_text(AXOLOTL_FSDP2)
    monkeypatch.setattr(hardware, "detect", hardware.Hardware)
    assert main(["apply", "auto", "axolotl.yml"]) == 2
    assert "`auto` is decided by the GPU, and this machine has none. Name a recipe" in capsys.readouterr().err
    assert Path("axolotl.yml").read_text() == AXOLOTL_FSDP2


ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
FSDP2 = (
    "base_model: m\nmicro_batch_size: 2\nbf16: true\nfp8: true\ntorch_compile: true\nfsdp_version: 2\n"
    "fp8_enable_fsdp_float8_all_gather: true\nfsdp_config:\n  reshard_after_forward: true\n"
)
TORCHTITAN = "[job]\n[training]\nmixed_precision_param = 'bfloat16'\n[parallelism]\ndata_parallel_shard_degree = -1\n"


@pytest.mark.parametrize(
    ("name", "text", "recipe", "shown", "absent"),
    [
        (
            "ds.json",
            '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "fp32",'
            ' "data_types": {"grad_accum_dtype": "float32"}}',
            "bf16_mixed", "matches bf16_mixed", "fp16.enabled",
        ),
        (
            "ds.json",
            '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "communication_data_type": "float32"}',
            "bf16_mixed", "communication_data_type: float32 -> fp32", "in place of BF16_Optimizer",
        ),
        (
            "ds.json", '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}', "bf16_mixed",
            "DeepSpeed builds BF16_Optimizer in place of DeepSpeedZeroOptimizer, because of data_types",
            "problem",
        ),
        (
            "mp.yaml", ACCELERATE + "fp16: true\n", "bf16_mixed",
            "fp16: true -> (removed) (the old key, ignored next to mixed_precision)", "problem",
        ),
        (
            "mp.yaml",
            ACCELERATE + "mixed_precision: fp8\nfp8_config:\n  fp8_backend: TE\n  fp8_format: E4M3\n"
            "  fp8_amax_compute_algo: max\n",
            "bf16_with_fp8_delayed_scaling_mixed", "fp8_config.fp8_format: E4M3 -> HYBRID", "another spelling",
        ),
        (
            "axolotl.yml", FSDP2, "hopper_bf16_with_fp8_mixed",
            "true -> (removed) (the policy gathers in the compute dtype; --override fp8_param_gather=true keeps it)",
            "problem",
        ),
        ("llama3.toml", TORCHTITAN, "bf16_mixed", "is a config of torchtitan, which mpguard does not read", "matches"),
        ("setup.toml", "[project]\n", "bf16_mixed", "is not a config; a YAML or JSON file is needed", "matches"),
    ],
)  # fmt: skip
def test_what_a_file_has_in_another_form_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, recipe: str, shown: str, absent: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    main(["apply", "--check", recipe, str(path)])
    printed = capsys.readouterr()
    assert shown in printed.out + printed.err and absent not in printed.out
