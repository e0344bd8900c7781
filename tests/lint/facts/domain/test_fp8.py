"""The versions that a project requires, the alignment that FP8 needs, and how the rules about FP8 use both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpguard.lint.facts.program import api_names
from mpguard.lint.model.result import FileReport
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.project.requirements import RANGE, Required, required
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target
from mpguard.policy.hardware import NEEDS
from mpguard.policy.policy import BACKENDS

OLD = "import transformer_engine.pytorch as te\n\nwith te.fp8_autocast(fp8_recipe=recipe):\n    model(x)\n"
NEW = "import transformer_engine.pytorch as te\n\nwith te.autocast(recipe=recipe):\n    model(x)\n"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("requirements.txt", "transformer-engine[pytorch]==1.13.0", Required((1, 13, 0), (1, 13, 1))),
        ("pyproject.toml", 'dependencies = ["transformer_engine[pytorch]>=2.10,<3"]', Required((2, 10), (3,))),
        ("pyproject.toml", 'transformer-engine = "^2.11"', Required((2, 11), (3,))),
        ("setup.py", "install_requires=['transformer-engine']", Required()),
        ("requirements.txt", "transformer_engine>=2.10\ntransformer_engine<2.12", Required()),
        ("requirements-gpu.txt", "transformer_engine_cu12 ~= 2.9  # FP8", Required((2, 9), (3,))),
        ("setup.py", "install_requires=['transformer-engine~=1.4.5']", Required((1, 4, 5), (1, 5))),
        ("requirements.txt", "my-transformer-engine==9.9", Required()),
        ("pyproject.toml", '"transformer-engine@git+https://github.com/NVIDIA/T.git@v1.1"', Required((1, 1), (1, 2))),
        ("requirements.txt", "transformer-engine @ git+https://github.com/NVIDIA/T.git@main", Required()),
        (
            "Dockerfile",
            "RUN pip install git+https://github.com/nvidia/TransformerEngine.git@v2.4\n",
            Required((2, 4), (2, 5)),
        ),
        ("Dockerfile", "RUN pip install git+https://github.com/nvidia/TransformerEngine.git@stable\n", Required()),
        ("Dockerfile", "RUN pip install git+https://github.com/me/my-transformer-engine.git@v2.4\n", Required()),
        ("Dockerfile", "ARG IMAGE=nvcr.io/nvidia/pytorch:25.08-py3\n", Required(below=(2, 9))),
        ("Dockerfile", "FROM nvcr.io/nvidia/pytorch:24.01-py3\n", Required(below=(2, 0))),
        ("README.md", "Run\n\n```\ndocker run --rm nvcr.io/nvidia/pytorch:24.01-py3\n```\n", Required(below=(2, 0))),
        ("Dockerfile", "FROM nvcr.io/nvidia/pytorch:26.04-py3\n", Required()),
        ("requirements.txt", "--index-url https://download.pytorch.org/whl/cu124\ntorch", Required(cuda=(12, 4))),
        ("Dockerfile", "FROM nvidia/cuda:12.9.1-devel\n", Required(cuda=(12, 9))),
    ],
)
def test_requirements(file: str, text: str, expected: Required, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    assert required(str(tmp_path), str(tmp_path), "transformer_engine") == expected


def test_the_nearest_file_that_names_it_decides(tmp_path: Path) -> None:
    inner = tmp_path / "app"
    inner.mkdir()
    (tmp_path / "requirements.txt").write_text("transformer-engine==2.11")
    (inner / "requirements.txt").write_text("torch")
    assert required(str(inner), str(tmp_path), "transformer_engine").since((2, 10))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "requirements.txt").write_text("transformer-engine==1.9")
    assert required(str(tmp_path / "other"), str(tmp_path), "transformer_engine").before((2, 0))


def test_an_image_further_up_does_not_count_where_a_nearer_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM nvcr.io/nvidia/pytorch:24.05-py3\n")
    assert required(str(tmp_path / "other"), str(tmp_path), "transformer_engine").before((2, 9))
    (tmp_path / "app" / "Dockerfile").write_text("FROM nvcr.io/nvidia/pytorch:26.04-py3\n")
    assert required(str(tmp_path / "app"), str(tmp_path), "transformer_engine") == Required()


def test_setup_py_is_next_to_the_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "setup.py").write_text("install_requires=['transformer-engine<=1.9']")
    assert required(str(package), str(package), "transformer_engine").before((2, 0))


@pytest.mark.parametrize(
    ("nearest", "expected"),
    [
        ("transformer-engine >= 1.5", Required((1, 5), (1, 11, 1))),
        ("transformer-engine >= 2.0", Required((2, 0))),
        ("transformer-engine == 2.1.0", Required((2, 1, 0), (2, 1, 1))),
    ],
)
def test_an_upper_bound_further_up_holds_where_the_nearest_list_has_none(
    nearest: str, expected: Required, tmp_path: Path
) -> None:
    example = tmp_path / "copied" / "examples"
    example.mkdir(parents=True)
    (tmp_path / "requirements.txt").write_text("transformer-engine==1.11.0")
    (example / "requirements.txt").write_text(nearest)
    assert required(str(example), str(tmp_path), "transformer_engine") == expected


@pytest.mark.parametrize(
    ("wheels", "expected"),
    [(("ours",), Required((1, 13, 0), (1, 13, 1))), (("ours", "other"), Required())],  # several are an environment
)
def test_an_unpacked_wheel_declares_its_requirements(
    wheels: tuple[str, ...], expected: Required, tmp_path: Path
) -> None:
    metadata = (
        "Name: it\nRequires-Dist: transformer-engine (==1.13.0) ; extra == 'te'\n\nNeeds transformer-engine>=2.10\n"
    )
    for wheel in wheels:
        (tmp_path / f"{wheel}-1.0.dist-info").mkdir()
        (tmp_path / f"{wheel}-1.0.dist-info" / "METADATA").write_text(metadata)
    assert required(str(tmp_path), str(tmp_path), "transformer_engine") == expected


@pytest.mark.parametrize(
    ("specifier", "versions", "excluded"),
    [
        ("==2.3", ">=2.4", True),
        ("==2.4", ">=2.4", False),
        ("<2.4", ">=2.4", True),
        (">=1.10", ">=2.4", False),
        ("", ">=2.4", False),
        (">=2.11", "<2.11", True),
        (">=2.10", "<2.11", False),
        ("==3.1", ">=2.4,<3", True),
        ("==2.9", ">=2.4,<3", False),
    ],
)
def test_versions_that_a_project_excludes(specifier: str, versions: str, excluded: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"torch{specifier}\n")
    assert required(str(tmp_path), str(tmp_path), "torch").excludes(versions) is excluded


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("README.md", "```\npip install torch==1.12.1+cu113\n```\n", Required((1, 12, 1), (1, 12, 2), (11, 3))),
        ("README.md", "Run `pip install \\\n  'torch>=2.1,<2.4'`.\n", Required((2, 1), (2, 4))),
        ("README.md", "Faster with torch==2.9 (`pip install ours`).\n", Required()),
        ("INSTALL.md", "conda install pytorch=1.12 torchvision==0.13.1 -c pytorch\n", Required((1, 12), (1, 13))),
        ("environment.yml", "dependencies:\n  - pytorch=2.3.1=py3.11_cuda12.1\n", Required((2, 3, 1), (2, 3, 2))),
        ("conda_env_gpu.yaml", "dependencies:\n  - pytorch==2.0.0\n", Required((2, 0, 0), (2, 0, 1))),
        ("requirments.txt", "torch==1.10.2\n", Required((1, 10, 2), (1, 10, 3))),
        ("PRETRAIN.md", "conda install pytorch==1.8.0 torchvision==0.9.0 -c pytorch\n", Required((1, 8, 0), (1, 8, 1))),
        ("README.md", "conda create -n env python=3.8 pytorch==1.12.0 -c pytorch\n", Required((1, 12, 0), (1, 12, 1))),
        ("README.md", "## Requirements\n\n- python == 3.8\n- PyTorch == 1.8.1\n", Required((1, 8, 1), (1, 8, 2))),
        ("README.md", "It is faster than before if torch == 1.8.1 is there.\n", Required()),
        ("install_all.sh", "conda install -y pytorch==1.7.0 cudatoolkit=10.2\n", Required((1, 7, 0), (1, 7, 1))),
        ("vl.yml", "name: vl\ndependencies:\n  - pytorch=1.12.1=py3.9_0\n", Required((1, 12, 1), (1, 12, 2))),
        ("train.yml", "name: vl\ntorch: ==1.12\n", Required()),
        ("pyproject.toml", "[tool.poetry.dependencies]\ntorch = '~1.13'\n", Required((1, 13), (1, 14))),
        (
            "Dockerfile",
            "ARG TORCH=1.12.1\nENV CUDA 113\nRUN pip install torch==${TORCH} torchvision==$VISION\n",
            Required((1, 12, 1), (1, 12, 2)),
        ),
        ("documents/INSTALL.md", "```\npip install torch==1.12.1\n```\n", Required((1, 12, 1), (1, 12, 2))),
        ("envelope.yaml", "pytorch==2.0.0\n", Required()),
        ("requirements.txt", "pytorch-lightning==1.9\n", Required()),
        ("docker/requirement.txt", "torch==2.1\n", Required((2, 1), (2, 2))),
        ("docker/Dockerfile", "RUN pip install torch==2.1\n", Required((2, 1), (2, 2))),
        ("docs/install.md", "   pip install torch==2.1\n", Required((2, 1), (2, 2))),
        ("docker/notes.txt", "torch==2.1\n", Required()),
    ],
)  # fmt: skip
def test_what_a_project_installs(file: str, text: str, expected: Required, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert required(str(tmp_path), str(tmp_path), "torch") == expected


@pytest.mark.parametrize(("listed", "expected"), [("torch", (2, 2)), ("torch>=1.8", None), ("torch==2.4", (2, 5))])
def test_a_readme_pins_what_a_list_has_no_version_for(
    listed: str, expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("    pip install torch==2.0\n")
    (tmp_path / "README_en.md").write_text("    pip install torch==2.1\n")
    (tmp_path / "requirements.txt").write_text(f"{listed}\ntorchvision\n")
    assert required(str(tmp_path), str(tmp_path), "torch").below == expected


def test_the_versions_of_all_rules_can_be_compared() -> None:
    stated = [versions for rule in rules(own_only=True).values() for versions in rule.versions.values()]
    assert stated and all(re.fullmatch(rf"{RANGE.pattern}(,{RANGE.pattern})*", each) for each in stated)


@pytest.mark.parametrize(("specifier", "lines"), [("==0.20", [5]), ("<1.0", [5]), (">=0.20", [3, 5]), ("", [3, 5])])
def test_findings_about_versions_that_are_excluded_are_dropped(
    specifier: str, lines: list[int], tmp_path: Path
) -> None:
    """With an accelerate older than 1.0 only what mpguard itself reads is reported."""
    (tmp_path / "setup.py").write_text(f"setup(install_requires=['accelerate{specifier}'])\n")
    path = tmp_path / "mp.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  unknown_dtype: 1\nfp8_config:\n  mpguard_recipes: x\n")
    engine = Engine(rules(own_only=True), Options(Selectors(select=("MPG801",))))
    report = engine.run([Target(str(path), "config", named=True)])[0]
    assert [finding.line for finding in report.findings] == lines


@pytest.mark.parametrize(("version", "level"), [("2.20", "safe"), ("2.3", "unsafe")])
def test_the_new_names_are_safe_if_the_project_requires_them(version: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"transformer-engine>={version}\n")
    path = tmp_path / "train.py"
    path.write_text(OLD)

    def run(fix: str | None) -> FileReport:
        engine = Engine(rules(own_only=True), Options(Selectors(select=("MPG406",)), fix=fix))
        return engine.run([Target(str(path), "python", named=True)])[0]

    assert [finding.fix.applicability for finding in run(None).findings if finding.fix is not None] == [level]
    fixed = run("safe").fix_result
    assert (fixed.after.decode() if fixed is not None else OLD) == (NEW if level == "safe" else OLD)


def test_every_recipe_of_te_has_its_requirements() -> None:
    assert set(api_names.FP8_RECIPES.values()) <= set(NEEDS)
    assert all(NEEDS[row].multiple > 1 for row in api_names.FP8_RECIPES.values())
    assert {row for row in BACKENDS if NEEDS[row].multiple == 1} == set()


def test_a_script_that_installs_a_version_counts_next_to_a_list_with_another(tmp_path: Path) -> None:
    for file, expected in (("README.md", Required((2, 0), (2, 1))), ("setup.sh", Required((2, 0), (2, 1, 1)))):
        folder = tmp_path / file.partition(".")[0]
        folder.mkdir()
        (folder / "requirements.txt").write_text("torch==2.0\n")
        (folder / file).write_text("pip install torch==2.1.0\n")
        assert required(str(folder), str(folder), "torch") == expected


@pytest.mark.parametrize(("hub", "old"), [("==0.0.12", True), (">=0.0.12", False), ("==0.25", False)])
def test_an_old_hub_bounds_accelerate(hub: str, old: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"huggingface_hub{hub}\naccelerate\n")
    assert required(str(tmp_path), str(tmp_path), "accelerate").before((1, 0)) is old


def test_an_old_python_bounds_what_needs_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text(
        "dependencies:\n  - python=3.7\n  - pip:\n    - accelerate\n    - deepspeed\n"
    )
    found = {
        name: required(str(tmp_path), str(tmp_path), name).below for name in ("accelerate", "lightning", "deepspeed")
    }
    assert found == {"accelerate": (0, 21), "lightning": (2, 0), "deepspeed": None}


@pytest.mark.parametrize(("torch", "old"), [("1.9.1", True), ("1.13", False)])
def test_an_old_torch_bounds_what_needs_a_newer_one(torch: str, old: bool, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"torch=={torch}\naccelerate\npytorch-lightning>=1.5\n")
    for package, version in (("accelerate", (1, 0)), ("pytorch-lightning", (2, 0))):
        assert required(str(tmp_path), str(tmp_path), package).before(version) is old


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchaudio==0.8.0", Required((1, 8, 0), (1, 8, 1))),
        ("torchvision==0.13.1", Required((1, 12, 1), (1, 12, 2))),
        ("torchvision==0.16.0", Required((2, 1, 0), (2, 1, 1))),
        ("torchaudio==2.1.0", Required((2, 1, 0), (2, 1, 1))),
        ("torchvision", Required()),
        ("torch==2.6.0\ntorchvision==0.13.1", Required((2, 6, 0), (2, 6, 1))),
    ],
)
def test_a_companion_of_torch_tells_its_version(line: str, expected: Required, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(line + "\n")
    assert required(str(tmp_path), str(tmp_path), "torch") == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchaudio==0.3.1", Required((1, 3, 1), (1, 3, 2), (10, 1))),
        ("torchaudio", Required(None, (2, 0), (10, 1))),
    ],
)
def test_a_companion_of_torch_tells_more_than_an_old_python(line: str, expected: Required, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(line + "\n")
    (tmp_path / "Dockerfile").write_text("FROM nvidia/cuda:10.1-base\nRUN conda install python=3.7\n")
    assert required(str(tmp_path), str(tmp_path), "torch") == expected
