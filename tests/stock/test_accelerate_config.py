"""S5, S6, S7, S24, S25, S27, S28: how accelerate reads its own YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("accelerate", reason="the real library runs here")

from accelerate.utils import dataclasses
from processes import mp_yaml
from stock import ENVIRONMENT, clean_accelerate, config, fixed_upstream, launched, linted, mpguard, mpguard_launch

#: The line of a section that `config` writes last.
LAST = 8


def test_s05_the_wizard_writes_keys_that_nothing_reads(tmp_path: Path) -> None:
    """The real questionnaire, with mocked answers and with TE and MS-AMP mocked as installed."""
    from accelerate.commands.config import cluster

    def answered(backend: str) -> dict[str, Any]:
        def options(question: str, choices: list[str] = [], convert: Any = None, default: int = 0) -> Any:  # noqa: B006
            wanted = {"Do you wish to use mixed precision?": "fp8", "Which FP8 backend do you want to use?": backend}
            number = choices.index(wanted[question]) if question in wanted else default
            return convert(number) if convert else number

        def field(question: str, convert: Any = None, default: Any = None, error_message: str | None = None) -> Any:
            return default

        with (
            mock.patch.multiple(cluster, _ask_options=options, _ask_field=field, is_fp8_available=lambda: True),
            mock.patch.multiple(cluster, is_transformer_engine_available=lambda: True, is_msamp_available=lambda: True),
        ):
            return dict(cluster.get_cluster_input().fp8_config)

    written = answered("te") | answered("msamp")
    dead = {"amax_history_length", "amax_compute_algorithm", "optimization_level"}
    assert dead <= written.keys(), fixed_upstream(5)

    section = {"backend": "TE", "amax_history_length": 16, "amax_compute_algorithm": "max", "optimization_level": "O1"}
    path = config(tmp_path, mixed_precision="fp8", fp8_config=json.dumps(section))
    run = launched(tmp_path, config=path)
    assert run.status == 0, run.output
    (worker,) = run.workers
    read = [worker[f"ACCELERATE_FP8_{name}"] for name in ("AMAX_HISTORY_LEN", "AMAX_COMPUTE_ALGO", "OPT_LEVEL")]
    assert read == ["1024", "most_recent", "O2"], fixed_upstream(5)

    assert ("MPG801", LAST) in linted(path)
    recipe = "bf16_with_fp8_delayed_scaling_mixed"
    section |= {"mpguard_recipe": recipe, "mpguard_overrides": {"fp8_param_gather": False}}
    path = config(tmp_path, mixed_precision="fp8", fp8_config=json.dumps(section))
    result = mpguard("apply", recipe, path)
    assert result.status == 0, result
    text = path.read_text()
    assert not any(name in text for name in ("amax_history_length", "amax_compute_algorithm"))
    assert "amax_history_len" in text


def test_s06_unknown_keys_of_sections_are_accepted(tmp_path: Path) -> None:
    keys = {
        "fp8_config": "{backend: TE, recipe: rowwise}",
        "fsdp_config": "{mixed_precision_policy: fp16}",
        "deepspeed_config": "{bf16_enabled: true}",
        "dynamo_config": "{colour: red}",
    }
    path = config(tmp_path, mixed_precision="fp8", **keys)
    run = launched(tmp_path, config=path)
    assert run.status == 0 and "recipe" not in run.output, fixed_upstream(6)
    assert run.workers[0]["ACCELERATE_FP8_RECIPE"] == "rowwise", "handed over, and nothing reads it"
    assert {line for code, line in linted(path) if code == "MPG801"} == {LAST, LAST + 1, LAST + 2, LAST + 3}


def test_s07_deepspeed_config_overrides_the_top_level(tmp_path: Path) -> None:
    """Also without DeepSpeed."""
    path = config(tmp_path, deepspeed_config="{mixed_precision: fp16}")
    run = launched(tmp_path, config=path)
    assert run.status == 0, run.output
    assert run.workers[0]["ACCELERATE_MIXED_PRECISION"] == "fp16", fixed_upstream(7)

    assert ("MPG804", LAST) in linted(path)
    ours = mp_yaml(tmp_path, deepspeed_config="{mixed_precision: fp16}")
    result = mpguard("launch", "--config", ours, ENVIRONMENT)
    assert result.status == 1 and "silently overrides the top-level mixed_precision" in result.err, result
    assert mpguard("apply", "bf16_mixed", ours).status == 0
    assert "fp16" not in ours.read_text()


def test_s24_fp8_config_reaches_workers_under_fp8_only(tmp_path: Path) -> None:
    section = "{backend: TE, mpguard_recipe: bf16_mixed}"
    for precision, arrives in (("fp8", True), ("bf16", False)):
        run = launched(tmp_path, config=config(tmp_path, mixed_precision=precision, fp8_config=section))
        assert ("ACCELERATE_FP8_MPGUARD_RECIPE" in run.workers[0]) is arrives, fixed_upstream(24)

    ours = launched(tmp_path, config=mp_yaml(tmp_path), program=mpguard_launch)
    assert json.loads(ours.workers[0]["MPGUARD_POLICY"]) == {"name": "bf16_mixed", "bf16": True}, ours.output


def test_s25_precision_with_a_deepspeed_file_is_refused_even_if_both_agree(tmp_path: Path) -> None:
    second = tmp_path / "ds.json"
    second.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": f"{{deepspeed_config_file: {second}}}"}
    plugin_of(launched(tmp_path, config=config(tmp_path, **{**keys, "mixed_precision": None})).workers[0])
    both = config(tmp_path, **keys)
    run = launched(tmp_path, config=both)
    with pytest.raises(ValueError, match="will be ignored"):
        plugin_of(run.workers[0])
        pytest.fail(fixed_upstream(25))
    assert "MPG861" in {code for code, _ in linted(config(tmp_path, **keys, use_cpu="false"))}

    ours = mp_yaml(tmp_path, **keys)
    assert mpguard("apply", "bf16_mixed", ours, second).status == 0
    assert "\nmixed_precision" not in ours.read_text()
    assert json.loads(second.read_text())["bf16"] == {"enabled": True}
    plugin_of(launched(tmp_path, config=ours).workers[0])


def plugin_of(worker: dict[str, str]) -> Any:
    """Return the plugin that `Accelerator()` creates in a worker with this environment."""
    from accelerate.utils import DeepSpeedPlugin

    with clean_accelerate(**worker):
        return DeepSpeedPlugin()


def test_s27_dynamo_config_reaches_no_worker_under_deepspeed(tmp_path: Path) -> None:
    dynamo = {"dynamo_config": "{dynamo_backend: INDUCTOR}"}
    run = launched(tmp_path, config=config(tmp_path, **dynamo))
    assert run.workers[0]["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR", "the control: it does without DeepSpeed"
    path = config(tmp_path, distributed_type="DEEPSPEED", deepspeed_config="{zero_stage: 1}", **dynamo)
    run = launched(tmp_path, config=path)
    assert run.status == 0, run.output
    assert not any("DYNAMO" in name for name in run.workers[0]), fixed_upstream(27)
    assert ("MPG801", LAST + 1) in linted(path)


def test_s28_spellings_that_stop_the_run(tmp_path: Path) -> None:
    """An unquoted `no` is a boolean, and `(false, false, false)` a string. (The check for TE is mocked.)"""
    no = config(tmp_path, dynamo_config="{dynamo_backend: no}")
    run = launched(tmp_path, config=no)
    assert run.status != 0 and run.workers == [] and "'bool' object has no attribute" in run.output, fixed_upstream(28)
    assert ("MPG802", LAST) in linted(no)

    section = "\n  backend: TE\n  override_linear_precision: (false, false, false)"
    tuples = config(tmp_path, mixed_precision="fp8", fp8_config=section)
    (worker,) = launched(tmp_path, config=tuples).workers
    installed = mock.patch.object(dataclasses, "is_transformer_engine_available", lambda: True)
    with clean_accelerate(**worker), installed, pytest.raises(ValueError, match="invalid truth value"):
        dataclasses.TERecipeKwargs()
        pytest.fail(fixed_upstream(28))
    assert ("MPG813", LAST + 2) in linted(tuples)
