"""`mpguard recipes`: the table, one recipe, and what it becomes in a target."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from limits import seconds

import mpguard
from mpguard.cli import main
from mpguard.cli import recipes as command
from mpguard.policy import hardware
from mpguard.policy.hardware import Hardware
from mpguard.targets.plugin import plugins

H100 = Hardware("NVIDIA H100", (9, 0), 8, (12, 8), {"te": "2.20", "torchao": "0.18", "triton": "3.6"})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command as on some machine."""

    def use(machine: Hardware) -> None:
        monkeypatch.setattr(hardware, "detect", lambda: machine)

    return use


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["recipes", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_has_every_recipe_once_and_says_what_runs_here(capsys: pytest.CaptureFixture[str], on: Any) -> None:
    on(Hardware())
    table = lines(capsys)
    assert table[0].split() == ["recipe", "compute", "fp8", "master", "reduce", "here"]
    rows = {row.split()[0]: row for row in table[1 : table.index("")]}
    assert list(rows) == list(mpguard.recipes())
    assert rows["bf16_mixed"].split() == ["bf16_mixed", "bf16", "-", "fp32", "fp32", "yes"]
    assert rows["bf16_with_mxfp8_mixed"].endswith("no: needs compute capability 10.0 (this machine has no GPU)")
    assert rows["auto"].endswith("yes: fp32, no GPU")


def test_on_a_hopper_what_runs_is_another(capsys: pytest.CaptureFixture[str], on: Any) -> None:
    on(H100)
    rows = {row.split()[0]: row for row in lines(capsys) if row}
    assert rows["bf16_with_fp8_current_scaling_mixed"].endswith("yes")
    assert "needs CUDA 12.9" in rows["bf16_with_fp8_subchannel_scaling_mixed"]
    assert "needs compute capability 10.0 or higher for MXFP8" in rows["bf16_with_mxfp8_mixed"]
    wish = "FP8, with torchao, for models that are faster in it"
    assert rows["auto"].endswith(f"yes: bf16_with_fp8_current_scaling_mixed, Hopper: {wish}")


def test_json_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == 1
    assert [each["name"] for each in facts["recipes"]] == list(mpguard.recipes())
    for each in facts["recipes"]:
        assert each["summary"].endswith(".")
        assert mpguard.Policy.of(each["fields"]) == mpguard.recipe(each["name"])


def test_one_recipe_shows_its_fields_and_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    page = "\n".join(lines(capsys, "bf16_with_fp8_current_scaling_mixed"))
    assert "  num_layers_at_end_in_bf16 = 1" in page
    for target in plugins():
        assert f"\n  {target} " in page
    fsdp2 = page.index("\n  fsdp2 ")
    assert re.search(r"cast_forward_inputs=true\n +not supported: fp8,", page[fsdp2:])


def test_an_object_is_shown_as_it_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    assert lines(capsys, "bf16_mixed", "--for", "fsdp2") == [
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None, "
        "cast_forward_inputs=True)"
    ]


def test_deepspeeds_is_the_json_file_itself(capsys: pytest.CaptureFixture[str]) -> None:
    shown = "\n".join(lines(capsys, "bf16-mixed", "--for", "deepspeed", "--strategy", "deepspeed-zero1"))
    assert json.loads(shown) == mpguard.recipe("bf16_mixed").to("deepspeed", "deepspeed-zero1")


def test_without_the_library_it_says_so_and_shows_the_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins()["te"], "module", "a_library_that_nobody_has")
    assert main(["recipes", "bf16_with_mxfp8_mixed", "--for", "te"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].endswith("which is not installed: pip install 'mpguard[te]'")
    assert "recipe='MXFP8BlockScaling'" in printed.out
    assert "te: has no setting for `fp8_param=auto` of the policy; supported by " in printed.err


def test_what_is_not_carried_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "bf16_with_fp8_current_scaling_mixed", "--for", "fsdp1"]) == 0
    assert "fsdp1: has no setting for `fp8=hybrid` of the policy; supported by accelerate" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["accelerate", "transformers", "megatron"])
def test_keyword_targets_show_their_keywords(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="the real library runs here")
    shown = lines(capsys, "bf16_mixed", "--for", target)
    arguments = plugins()[target].build_arguments(mpguard.recipe("bf16_mixed"))
    assert shown[0].startswith("# ")
    assert all(f"{name}={value!r}" in shown for name, value in arguments.items())


def test_json_of_a_target_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    assert main(["recipes", "fp16_mixed", "--for", "torch", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["arguments"]["scaling"] == {"enabled": True, "init_scale": 2.0**32, "growth_interval": 1000}
    assert facts["object"].startswith("Precision(compute=torch.float16")
    assert [each["field"] for each in facts["not_carried"]] == ["grad_reduce_in_fp32"]


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["bf16_mxied"], "`bf16_mixed`"),
        (["bf16_mixed", "--for", "fspd2"], "`fsdp2`"),
        (["bf16_mixed", "--for", "fsdp2", "--strategy", "fsdp3"], "`fsdp2`"),
        (["bf16_mixed", "--strategy", "deepspeed"], "`deepspeed-zero"),
        (["bf16_mixed", "--for", "torchao"], "torchao: the policy `bf16_mixed` has no FP8"),
        (["--for", "fsdp2"], "Name one: mpguard recipes NAME --for fsdp2"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_near(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mpguard: ") and near in printed.err


def test_the_table_needs_no_framework() -> None:
    code = (
        "import sys; from mpguard.cli import main; main(['recipes']); main(['recipes', 'bf16_mixed']);"
        "assert not {'torch', 'accelerate', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60))
    assert done.returncode == 0, done.stderr


def test_on_a_terminal_the_table_is_richs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    shown = "\n".join(lines(capsys))
    assert "nemotron_3_super_bf16_with_nvfp4_mixed" in shown and "te/torchao tensorwise" in shown


def test_a_text_without_torch_is_that_of_the_object() -> None:
    pytest.importorskip("torch", reason="the object has its dtypes")
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for name in ("bf16_mixed", "fp16_mixed"):
        policy = mpguard.recipe(name)
        built = policy.to("fsdp2")
        assert isinstance(built, MixedPrecisionPolicy)
        arguments = plugins()["fsdp2"].build_arguments(policy)
        assert command._text_of("MixedPrecisionPolicy", arguments) == repr(built)


def test_the_text_of_fsdp2_needs_no_torch() -> None:
    program = (
        "import sys; from mpguard.cli import main; main(['recipes', 'bf16_mixed', '--for', 'fsdp2']);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=seconds(60), stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("width", [80, 60])
def test_tables_fit_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(Hardware())
    monkeypatch.setattr(command, "columns", lambda: width)
    for arguments in ([], ["bf16_mixed"], ["bf16_with_mxfp8_mixed"]):
        printed = lines(capsys, *arguments)
        words = max(len(word) for line in printed for word in line.split())
        longest = max(printed, key=len)
        assert len(longest) <= max(width, words + 20), longest
    assert "bf16_mixed" in lines(capsys) and "  bf16; master fp32, reduce fp32; here: yes" in lines(capsys)
