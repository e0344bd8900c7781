"""Config rules over more than their examples: dicts in Python code, what mpguard writes itself, odd files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rule_cases import expected_difference, named_examples

from mpguard.cli import main
from mpguard.lint.model.result import FileReport
from mpguard.lint.model.rule import Bad, ConfigRule, rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, kind_of
from mpguard.policy.recipes import recipes
from mpguard.targets.plugin import STRATEGIES

RULES = rules(own_only=True)
CONFIG_RULES = {code: rule for code, rule in RULES.items() if issubclass(rule, ConfigRule)}


def lint(path: Path, *codes: str, fix: str | None = None) -> FileReport:
    engine = Engine(RULES, Options(Selectors(select=codes or tuple(CONFIG_RULES)), fix=fix))  # type: ignore[arg-type]
    kind = kind_of(str(path))
    assert kind is not None
    (report,) = engine.run([Target(str(path), kind, named=True)])
    assert not report.defects, report.defects[0].traceback
    return report


def found(path: Path, *codes: str) -> list[tuple[str, int, int]]:
    return [(each.code, each.line, each.column) for each in lint(path, *codes).findings]


# -- dicts in Python code -----------------------------------------------------------------------------


def as_python(text: str) -> str:
    """A JSON file as the dict of a module, line for line."""
    return "config = " + text.replace("true", "True").replace("false", "False").replace("null", "None")


JSONS = [
    pytest.param(rule, example, id=name)
    for rule, example, name in named_examples(CONFIG_RULES)
    if "deepspeed" in rule.kinds and isinstance(example, Bad) and example.name.endswith(".json") and not example.files
]


@pytest.mark.parametrize(("rule", "example"), JSONS)
def test_a_dict_gets_the_findings_of_the_file_at_the_same_lines(
    rule: type[ConfigRule], example: Bad, tmp_path: Path
) -> None:
    text = example.code.replace("  # !", "")
    file, code = tmp_path / "ds_config.json", tmp_path / "train.py"
    file.write_text(text)
    code.write_text(as_python(text))
    in_file = found(file, rule.code)
    assert in_file
    assert [each[:2] for each in found(code, rule.code)] == [each[:2] for each in in_file]


@pytest.mark.parametrize(("rule", "example"), [each for each in JSONS if expected_difference(each.values[1])])  # type: ignore[arg-type]
def test_a_dict_is_fixed_like_the_file(rule: type[ConfigRule], example: Bad, tmp_path: Path) -> None:
    text = example.code.replace("  # !", "")
    file, code = tmp_path / "ds_config.json", tmp_path / "train.py"
    file.write_text(text)
    code.write_text(as_python(text))
    fixed_file, fixed_code = (lint(path, rule.code, fix="unsafe").fix_result for path in (file, code))
    assert fixed_file is not None and fixed_code is not None
    namespace: dict[str, object] = {}
    exec(fixed_code.after.decode(), namespace)
    assert namespace["config"] == json.loads(fixed_file.after)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_places_are_those_of_the_python_file(tmp_path: Path, newline: str, bom: bytes) -> None:
    text = (
        "# größer 🙂\nimport deepspeed\n\n\nclass Trainer:\n\tdef start(self, model):\n"
        '\t\tself.config = {"ü": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "loss_scale": 0}}\n'
    )
    path = tmp_path / "train.py"
    path.write_bytes(bom + text.replace("\n", newline).encode())
    line = text.splitlines()[6]
    assert found(path, "MPG822") == [("MPG822", 7, line.index('"loss_scale"') + 1)]
    result = lint(path, "MPG822", fix="safe").fix_result
    assert result is not None
    assert result.after == bom + text.replace(', "loss_scale": 0', "").replace("\n", newline).encode()


BOTH = '"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}'


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        (f"config = {{{BOTH}}}", True),
        (f"def config():\n    return {{{BOTH}}}", True),
        (f"engine = deepspeed.initialize(model=m, config={{{BOTH}}})", True),
        (f"arguments = TrainingArguments(deepspeed={{{BOTH}}})", True),
        (f"config = {{{BOTH}}}\nconfig['train_batch_size'] = 4", True),
        (f"config = {{**base, {BOTH}}}", True),
        (f"config = {{{BOTH}, **more}}", False),
        (f"config = {{{BOTH}}}\nconfig['fp16']['enabled'] = False", False),
        (f"config = {{{BOTH}}}\nconfig['fp16'] = off", False),
        (f"config = {{{BOTH}}}\nconfig[name] = off", False),
        (f"config = {{{BOTH}}}\nconfig.update(more)", False),
        (f"config = {{{BOTH}}}\nconfig['fp16'].update(enabled=False)", False),
        (f"config = {{{BOTH}}}\nconfig.pop('fp16')", False),
        (
            "ON = True\ndef f():\n    return {'train_batch_size': 8, 'bf16': {'enabled': ON}, 'fp16': {'enabled': ON}}",
            True,
        ),
        (
            "def config(on):\n    return {'train_batch_size': 8, 'bf16': {'enabled': on}, 'fp16': {'enabled': on}}",
            False,
        ),
        ("config = {'train_batch_size': 8, 'bf16': True, 'fp16': True}", False),
        ("config = {'bf16': {'enabled': True}, 'fp16': {'enabled': True}}", False),
        ("text = '''config = {" + BOTH + "}'''", False),
    ],
)
def test_what_counts_as_a_deepspeed_config_in_code(tmp_path: Path, code: str, reported: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(code + "\n")
    assert bool(found(path, "MPG821")) is reported


def test_suppressions_hold_for_dicts(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"config = {{{BOTH}}}  # noqa: MPG821\n")
    assert found(path, "MPG821", "MPG002") == []


@pytest.mark.parametrize(
    ("gpu", "reported"), [("a100", True), ("sm_80", True), ("h100", False), ("8.9", False), (None, False)]
)
def test_the_gpu_of_the_command_line(tmp_path: Path, gpu: str | None, reported: bool) -> None:
    path = tmp_path / "mp.yaml"
    path.write_text("distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: TE}\n")
    engine = Engine(RULES, Options(Selectors(select=("MPG408",)), gpu=gpu))
    (report,) = engine.run([Target(str(path), "config", named=True)])
    assert [(each.line, each.column) for each in report.findings] == ([(2, 1)] if reported else [])


# -- what mpguard writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_init_writes_is_clean(tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    written = 0
    for number, name in enumerate(recipes()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if main(["init", name, "--strategy", strategy, "-o", str(folder / "mp.yaml"), "--device", "gpu"]) != 0:
            continue
        written += 1
        for path in sorted(folder.iterdir()):  # MPG865 says of some recipes what `init` says itself
            assert [each for each in found(path) if each[0] != "MPG865"] == [], (name, path.read_text())
    capsys.readouterr()
    assert written


# -- recognised by content ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recbole.yaml", "train_batch_size: 2048\nlearning_rate: 0.001\neval_args: {mode: full}\n"),
        ("hydra.yaml", "defaults: [_self_]\nmixed_precision: no\nfp8_config: null\nname: x\nmodel: {fp16: true}\n"),
        ("lightning.yaml", "trainer: {precision: bf16-mixed}\nmodel: {class_path: x}\n"),
        ("package.json", '{"name": "amp", "scripts": {"fp16": "x"}}'),
        ("empty.json", "{}"),
        ("list.json", "[]"),
    ],
)  # fmt: skip
def test_other_files_are_no_configs(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert [each for each in found(tmp_path / name) if each[0] in ("MPG813", "MPG823")] == []


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: [1, 2]\nuse_cpu: true\nmixed_precision: {a: b}\nfp8_config: 3\ndeepspeed_config: [x]\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {1: 2, null: 3, true: 4}\nfp8_config: {backend: 7}\n7: 8\n",
        "base_model: x\ndatasets: []\nfp8: {a: 1}\nbf16: [full]\nfsdp_version: [2]\nfsdp_config: 3\n",
        '{"zero_optimization": 3, "bf16": 3, "fp16": [], "torch_autocast": "x", "data_types": null, "amp": 1}',
        '{"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true, "loss_scale": null, "hysteresis": {}}}',
    ],
)
def test_odd_values_break_no_rule(tmp_path: Path, text: str) -> None:
    path = tmp_path / ("odd.json" if text.startswith("{") else "odd.yaml")
    path.write_text(text)
    lint(path)
