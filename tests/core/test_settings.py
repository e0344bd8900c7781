"""`[tool.mpguard]` and mpguard.toml: which file applies, and that a misspelled setting is an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mpguard.core import settings
from mpguard.core.errors import SettingsError
from mpguard.core.settings import ToolSettings, nearest


@pytest.fixture(autouse=True)
def _fresh() -> None:
    settings._of_folder.cache_clear()


def test_all_keys_are_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""
[tool.mpguard]
select = ["MPG1", "MPG201"]
extend-select = ["MPG3"]
ignore = ["MPG302"]
include = ["*.py"]
exclude = ["third_party"]
configs = ["configs/mp.yaml"]
recipe = "bf16_mixed"
gpu = "h100"
training-paths = ["train*"]
inference-paths = ["serve"]
enforce = "warn"
[tool.mpguard.per-file-ignores]
"tests/**" = ["MPG1"]
""")
    assert nearest(tmp_path / "train.py") == ToolSettings(
        root=tmp_path,
        source=tmp_path / "pyproject.toml",
        select=("MPG1", "MPG201"),
        extend_select=("MPG3",),
        ignore=("MPG302",),
        per_file_ignores={"tests/**": ("MPG1",)},
        include=("*.py",),
        exclude=("third_party",),
        configs=("configs/mp.yaml",),
        recipe="bf16_mixed",
        gpu="h100",
        training_paths=("train*",),
        inference_paths=("serve",),
        enforce="warn",
    )
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(ToolSettings)} - {"root", "source"}
    assert fields == set(settings._KEYS)


def test_the_nearest_one_holds_alone(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.mpguard]\nignore = ['MPG101']\n")
    inner = tmp_path / "pkg" / "deep"
    inner.mkdir(parents=True)
    (tmp_path / "pkg" / "mpguard.toml").write_text("gpu = 'a100'\n")
    assert nearest(inner / "x.py").gpu == "a100"
    assert nearest(inner / "x.py").ignore == ()
    assert nearest(tmp_path / "x.py").ignore == ("MPG101",)


def test_a_pyproject_of_others_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "mpguard.toml").write_text("gpu = 'h100'\n")
    for name, text in {
        "a": "[tool.ruff]\nline-length = 100\n",
        "b": "# mpguard is not set up here\n",
        "c": "[broken\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(text)
        assert nearest(tmp_path / name / "x.py").gpu == "h100"


def test_mpguard_toml_goes_before_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.mpguard]\ngpu = 'a100'\n")
    (tmp_path / "mpguard.toml").write_text("gpu = 'h100'\n")
    assert nearest(tmp_path).gpu == "h100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.mpguard]\nselct = []\n", "pyproject.toml:2: there is no setting `selct`; did you mean `select`"),
        ("[tool.mpguard]\nselect = 'ALL'\n", "pyproject.toml:2: `select` is `ALL`; a list of strings is needed"),
        ("[tool.mpguard]\nignore = [1]\n", "`ignore` is [1]; a list of strings is needed"),
        ("[tool.mpguard]\n\ngpu = true\n", "pyproject.toml:3: `gpu` is true; a string is needed"),
        ("[tool.mpguard]\nenforce = 'loud'\n", "`enforce` is `loud`; one of error, warn, off is needed"),
        ("[tool.mpguard.per-file-ignores]\nx = 'MPG1'\n", "pyproject.toml:1: `per-file-ignores` is"),
        ("[tool]\nmpguard = 3\n", "`tool.mpguard` is 3; a table is needed"),
        ("[tool.mpguard]\npreview = 'yes'\n", "`preview` is `yes`; true or false is needed"),
        ("[tool.mpguard]\nexclude = ['']\n", "`exclude` is ['']; a list of patterns, none of them empty, is needed"),
        ("[tool.mpguard.per-file-ignores]\n'!' = ['MPG1']\n", "`per-file-ignores` is {'!': ['MPG1']}"),
        ("[tool.mpguard]\nselect = [\n", "pyproject.toml: is not TOML"),
        ("[tool.mpguard]\nselect = []\nselect = []\n", "pyproject.toml: is not TOML"),
    ],
)
def test_what_is_wrong_is_an_error_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        nearest(tmp_path / "train.py")
    assert message in str(error.value)


@pytest.mark.parametrize("header", ["[tool.mpguard]", "[mpguard]"])
def test_a_table_in_mpguard_toml_is_distinguished_from_a_setting(tmp_path: Path, header: str) -> None:
    (tmp_path / "mpguard.toml").write_text(f"{header}\npreview = true\n")
    with pytest.raises(SettingsError, match=r"; in this file the settings are at the top level, in no table$"):
        nearest(tmp_path)


def test_codes_in_lower_case_and_paths_from_here_are_as_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mpguard.toml").write_text(
        "ignore = ['mpg3']\nexclude = ['./old', '!./old/a.py']\nper-file-ignores = {'./src' = ['mpg101']}\n"
    )
    found = nearest(tmp_path)
    assert (found.ignore, found.exclude) == (("MPG3",), ("/old", "!/old/a.py"))
    assert found.per_file_ignores == {"/src": ("MPG101",)}


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mpguard.toml").write_text("configs = ['mp.yaml']\n")
    with pytest.raises(SettingsError, match=r"`configs` names .*mp\.yaml`, which is not a file"):
        nearest(tmp_path).config_paths()
