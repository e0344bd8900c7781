"""What lies around a file: launch configs, settings, and the modules that it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from mpguard.cli import main
from mpguard.core import settings
from mpguard.core.errors import ConfigError
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.project import launch_lines, tree
from mpguard.lint.project import project as module
from mpguard.lint.project.launch_configs import launch_config
from mpguard.lint.project.project import Project
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source import incremental
from mpguard.lint.source.files import Target, collect


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    settings._of_folder.cache_clear()
    tree.top_of.cache_clear()
    tree.outermost.cache_clear()
    return tmp_path


def make(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


# -- launch configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: 'NO'\nmixed_precision: bf16\n", ("bf16", "NO")),
        ("distributed_type: FSDP\nmixed_precision: BF16\n", ("bf16", "FSDP")),
        ("distributed_type: FSDP\n", (None, "FSDP")),
        ("distributed_type: 'NO'\nmixed_precision: no\n", (None, "NO")),  # YAML's boolean; the launch crashes
        ("distributed_type: 'NO'\nmixed_precision: 'no'\n", ("no", "NO")),
        ("distributed_type: 'NO'\nfp16: true\n", ("fp16", "NO")),
        ("distributed_type: 'NO'\nmixed_precision: bf16\ndeepspeed_config: {mixed_precision: fp16}\n", ("fp16", "NO")),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", ("bf16", "DEEPSPEED")),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\n", (None, "DEEPSPEED")),
    ],
)
def test_what_a_config_asks_for(text: str, expected: tuple[str | None, str]) -> None:
    make({"mp.yaml": text, "ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'})
    config = launch_config(Path("mp.yaml"))
    assert (config.mixed_precision, config.distributed_type) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}', "fp16"),
        ('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}', None),
        ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}', None),
    ],
)
def test_a_deepspeed_file(text: str, expected: str | None) -> None:
    make({"ds.json": text})
    config = launch_config(Path("ds.json"))
    assert (config.mixed_precision, config.distributed_type) == (expected, "DEEPSPEED")


@pytest.mark.parametrize(
    ("text", "message"),
    [("lr: 1\n", "this is neither"), ("distributed_type: [\n", "mp.yaml:2"), ("", "is empty"), ("- 1\n", "is a list")],
)
def test_what_is_no_launch_config(text: str, message: str) -> None:
    make({"mp.yaml": text})
    with pytest.raises(ConfigError, match=message):
        launch_config(Path("mp.yaml"))


def test_configs_beside_the_code_then_those_of_the_settings_then_those_given() -> None:
    config = "distributed_type: 'NO'\nmixed_precision: {}\n"
    make({
        "src/mp.yaml": config.format("bf16"), "src/own.yaml": "lr: 1\n", "src/broken.yaml": "distributed_type: [",
        "src/data.json": "[" + "1," * 50_000 + "1]", "src/ds.json": '{"zero_optimization": {"stage": 2}}',
        "given.yaml": config.format("fp8"), "conf/all.yaml": config.format("fp16"),
    })  # fmt: skip
    assert [(c.path, c.mixed_precision) for c in Project().configs_for("src/train.py")] == [("src/mp.yaml", "bf16")]
    assert Project().configs_for("train.py")[0].path == "given.yaml", "that of this folder"
    given = (launch_config(Path("given.yaml")),)
    assert Project(given).configs_for("src/train.py") == given
    make({"mpguard.toml": "configs = ['conf/all.yaml']\n"})
    settings._of_folder.cache_clear()
    assert [c.path for c in Project().configs_for("src/train.py")] == ["conf/all.yaml"]
    assert Project(given).configs_for("src/train.py") == given


def test_what_the_settings_declare() -> None:
    make({"mpguard.toml": "gpu = 'h100'\ntraining-paths = ['train*.py', 'loops']\ninference-paths = ['serve/**']\n"})
    project = Project()
    declared = [project.declared(path) for path in ("train_sft.py", "pkg/loops/a.py", "serve/a.py", "eval.py")]
    assert declared == ["training", "training", "inference", None]
    assert project.gpu("x.py") == "h100"
    assert Project(gpu="a100").gpu("x.py") == "a100"


# -- imports ------------------------------------------------------------------------------------------

TREE = {
    "pyproject.toml": "",
    "train.py": "",
    "utils.py": "def scale(): pass\n",
    "src/pkg/__init__.py": "",
    "src/pkg/losses.py": "def loss(): pass\n",
    "src/pkg/deep/__init__.py": "",
    "src/pkg/deep/model.py": "",
    "src/pkg/binary.py": "\0",
    "torch/__init__.py": "",
}


@pytest.mark.parametrize(
    ("imported", "by", "expected"),
    [
        ("utils", "train.py", "utils.py"),
        ("utils", "src/pkg/deep/model.py", "utils.py"),
        ("pkg.losses", "train.py", "src/pkg/losses.py"),
        ("pkg", "train.py", "src/pkg/__init__.py"),
        (".losses", "src/pkg/__init__.py", "src/pkg/losses.py"),
        ("..losses", "src/pkg/deep/model.py", "src/pkg/losses.py"),
        (".", "src/pkg/losses.py", "src/pkg/__init__.py"),
        ("..", "src/pkg/deep/model.py", "src/pkg/__init__.py"),
        ("......losses", "src/pkg/deep/model.py", None),
        ("numpy", "train.py", None),
        ("pkg.gone", "train.py", None),
        ("", "train.py", None),
        ("pkg/../utils", "train.py", None),
    ],
)
def test_modules_are_found_in_the_tree(imported: str, by: str, expected: str | None) -> None:
    make(TREE)
    assert tree.file_of(imported, by) == expected


def test_installed_packages_are_no_part_of_each_other() -> None:
    make({"pyproject.toml": "", ".venv/site-packages/a/__init__.py": "", ".venv/site-packages/a/x.py": "",
          ".venv/site-packages/a/b/__init__.py": "", ".venv/site-packages/a/b/y.py": "",
          ".venv/site-packages/torch/__init__.py": ""})  # fmt: skip
    inside = ".venv/site-packages/a/b/y.py"
    assert tree.file_of("a.x", inside) == ".venv/site-packages/a/x.py"
    assert tree.file_of("..x", inside) == ".venv/site-packages/a/x.py"
    assert tree.file_of("torch", inside) is None


def test_facts_of_an_imported_module_are_read_once() -> None:
    make(TREE)
    project = Project()
    project.begin("train.py")
    facts = project.source_of("pkg.losses", "train.py")
    assert facts is not None and facts.path == "src/pkg/losses.py"
    assert project.source_of(".losses", "src/pkg/deep/__init__.py") is None
    assert project.source_of("..losses", "src/pkg/deep/model.py") is facts
    assert project.source_of("pkg.binary", "train.py") is None, "one that cannot be read is unknown"


def test_classes_of_other_files_that_may_derive_from_one() -> None:
    make({"pyproject.toml": "", "base.py": "class Run: ...\nclass Used: ...\nclass Own(Run): ...\n",
          "a.py": "from base import Run, Used\n\nclass A(Run):\n    used = Used()\n"})  # fmt: skip
    project = Project()
    assert project.derived_elsewhere("base.py", "Run")
    assert project.imported_elsewhere("base.py", "Used") and not project.derived_elsewhere("base.py", "Used")
    assert not project.derived_elsewhere("base.py", "Own")


def test_names_that_other_code_may_use() -> None:
    make({"pkg/__init__.py": "", "pkg/sub/__init__.py": "from .policies import *\n",
          "pkg/sub/policies.py": "one = 1\ntwo = 2\nthree = 3\n",
          "pkg/sub/other.py": "from pkg import sub\nprint(sub.two, one_more)\n",
          "train.py": "from pkg import sub\n"})  # fmt: skip
    project, names = Project(), ("one", "two", "three", "")
    path = "pkg/sub/policies.py"
    assert [project.used_elsewhere(path, each) for each in names] == [True] * 4, "outside of a project, anything may"
    make({"pyproject.toml": "[project.scripts]\nrun = 'pkg.sub:three'\n"})
    tree.top_of.cache_clear()
    tree.outermost.cache_clear()
    assert [Project().used_elsewhere(path, each) for each in names] == [False, True, True, True]
    make({"pkg/__init__.py": "from .sub import *\n"})
    assert not Project().used_elsewhere(path, "one"), "no other project can import the package"
    make({"setup.py": ""})
    assert Project().used_elsewhere(path, "one"), "the package re-exports all"


def test_the_budget_is_that_of_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MODULES", 2)
    make(dict.fromkeys(("pyproject.toml", "train.py", "eval.py", "a.py", "b.py", "c.py"), ""))
    project = Project()
    for path in ("train.py", "eval.py"):
        project.begin(path)
        read = [project.source_of(name, path) is not None for name in ("a", "b", "a", "c")]
        assert read == [True, True, True, False], "the same, whatever was linted before"


def test_a_broken_module_is_no_problem_of_the_file_that_imports_it() -> None:
    make({
        "pyproject.toml": "", "losses.py": "def loss(model):\n    model.half((\n",
        "train.py": "import torch\nfrom losses import loss\nmodel = torch.nn.Linear(2, 2)\nwith torch.autocast('cuda'):"
        "\n    value = loss(model)\nvalue.backward()\ntorch.optim.SGD(model.parameters()).step()\n",
    })  # fmt: skip
    (report,) = Engine(rules(own_only=True), Options()).run([Target("train.py", "python", named=True)])
    assert not report.defects
    assert "MPG000" not in {finding.code for finding in report.findings}


# -- rules about code and its configs -----------------------------------------------------------------


def codes(*paths: str, given: str | None = None, fix: Literal["safe"] | None = None, **selected: Any) -> list[str]:
    launch_lines.in_tree.cache_clear()
    configs = (launch_config(Path(given), given),) if given else ()
    selectors = Selectors(select=selected.get("select", ("MPG103", "MPG506", "MPG514", "MPG86")))
    reports = Engine(rules(), Options(selectors, configs, fix=fix)).run(collect(paths).targets)
    for report in reports:
        assert not report.defects, report.defects[0].traceback
        if report.fix_result:
            Path(report.target.path).write_bytes(report.fix_result.after)
    return [finding.code for report in reports for finding in report.findings]


TRAINER = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16)
args = TrainingArguments("out", bf16=True)
Trainer(model, args, train_dataset=data).train()
"""
LITERAL = 'from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision="bf16")\n'


def test_one_mistake_is_one_finding() -> None:
    """The rule about the config reports where there is one, and the rules about code where there is none."""
    make({"train.py": TRAINER})
    assert codes("train.py", select=("MPG103", "MPG506", "MPG862", "MPG863")) == ["MPG103"]
    make({"mp.yaml": "distributed_type: FSDP\nmixed_precision: fp8\n"})
    assert codes("train.py") == ["MPG862", "MPG863"]


def test_a_config_that_is_given_decides() -> None:
    make({"train.py": LITERAL, "mp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n",
          "conf/fp8.yaml": "distributed_type: FSDP\nmixed_precision: fp8\n"})  # fmt: skip
    assert codes("train.py") == ["MPG514"]
    assert codes("train.py", given="conf/fp8.yaml") == ["MPG862"]
    make({"mpguard.toml": "configs = ['conf/fp8.yaml']\n"})
    settings._of_folder.cache_clear()
    assert codes("train.py") == ["MPG862"]
    make({"mpguard.toml": "configs = ['conf/fp8.yaml', 'mp.yaml']\n"})
    settings._of_folder.cache_clear()
    assert codes("train.py") == [], "they disagree, and one of them agrees with the code"
    make({"mpguard.toml": "inference-paths = ['train.py']\n"})
    settings._of_folder.cache_clear()
    assert codes("train.py", given="conf/fp8.yaml") == []


def test_the_fix_of_514_leaves_the_config_in_charge() -> None:
    make({"train.py": LITERAL, "mp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"})
    assert codes("train.py", fix="safe") == []
    assert Path("train.py").read_text().endswith("accelerator = Accelerator()\n")


def test_a_note_points_into_the_launch_line() -> None:
    make({"train.py": LITERAL, "run.sh": "# train\naccelerate launch --mixed_precision fp16 train.py\n"})
    launch_lines.in_tree.cache_clear()
    (report,) = Engine(rules(), Options(Selectors(select=("MPG862",)))).run(collect(["train.py"]).targets)
    (note,) = report.findings[0].notes
    assert (note.path, note.start, note.source) == (
        "run.sh",
        (2, 37),
        "accelerate launch --mixed_precision fp16 train.py",
    )
    assert note.message == "the launch line sets `fp16`"


@pytest.mark.parametrize("recipe", ["bf16_mixed", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mp.yaml", "distributed_type: FSDP  # two nodes\nmixed_precision: 'no'\nnum_processes: 4\n"),
        ("ds.json", '{\n  "zero_optimization": {"stage": 2},\n  "bf16": {"enabled": "auto"}\n}\n'),
        ("axolotl.yaml", "base_model: gpt2\nbf16: false  # why\nfp16: true\ndatasets: []\n"),
    ],
)
def test_the_fix_of_865_is_what_apply_writes(recipe: str, name: str, text: str) -> None:
    if name == "mp.yaml":
        text += f"fp8_config:\n  mpguard_recipe: {recipe}\n"
        text += "  mpguard_overrides: {fp8_exclude: [], fp8_param_gather: false}\n" if "fp8" in recipe else ""
    else:
        make({"mpguard.toml": f"recipe = '{recipe}'\n"})
    make({name: text, "other/" + name: text})
    settings._of_folder.cache_clear()
    if main(["apply", recipe, f"other/{name}"]) != 0:
        assert codes(name, select=("MPG865",)) == [], "a recipe that the file cannot be for"
        return
    expected = Path("other", name).read_text()
    assert bool(codes(name, select=("MPG865",))) == (expected != text)
    assert codes(name, select=("MPG865",), fix="safe") == []
    assert Path(name).read_text() == expected


def test_865_is_silent_without_a_recipe() -> None:
    make({"mp.yaml": "distributed_type: FSDP\nmixed_precision: fp16\n"})
    assert codes("mp.yaml", select=("MPG865",)) == []


def test_the_deepspeed_file_beside_the_config_is_found() -> None:
    make({"conf/mp.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"
                          "deepspeed_config: {deepspeed_config_file: ds.json}\n",
          "conf/ds.json": '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}'})  # fmt: skip
    assert codes("conf/mp.yaml", select=("MPG861",)) == ["MPG861"]


@pytest.mark.parametrize(
    ("files", "holds"),
    [
        ({"pyproject.toml": ""}, True),
        ({".git/HEAD": ""}, True),
        ({}, False),  # nothing shows that the folders around the library are a project
        ({"pyproject.toml": "", "lib/.git": "gitdir: ../.git/modules/lib\n"}, False),  # a submodule
    ],
)
def test_a_pin_of_a_project_holds_in_a_copied_library(files: dict[str, str], holds: bool) -> None:
    """It is installed into the environment of the project: `pip install -r requirements.txt; pip install -e lib`."""
    make({"requirements.txt": "accelerate==0.12.0", "lib/pyproject.toml": "", "lib/setup.py": "'accelerate>=0.10'",
          **files})  # fmt: skip
    found = Project().required("lib/examples/train.py", "accelerate")
    assert (found.low, found.before((1, 0))) == ((0, 10), holds)


@pytest.mark.parametrize(
    "name",
    [
        "reqs.txt", "requrements.txt", "Requirements_gpu.txt", "docker/requirements.txt", "settings.ini", "requirement",
        "requirements",
    ],
)  # fmt: skip
def test_files_that_name_requirements(name: str) -> None:
    content = "requirements = torch==1.9.0\n[train]\ntorch = 2.8\n" if name == "settings.ini" else "torch==1.9.0\n"
    make({"pyproject.toml": "", name: content})
    assert Project().required("train.py", "torch").before((1, 10))


@pytest.mark.parametrize(
    "text",
    [
        "Package    Version\n---------- -------\ntorch      1.10.2+cu113\ntimm       0.5\n",
        "# packages in environment at /opt/conda:\n#\n# Name  Version  Build\npytorch  1.9.0  py3.8_0\n",
    ],
)
def test_a_list_that_pip_or_conda_has_printed_pins(text: str) -> None:
    make({"pyproject.toml": "", "requirements.txt": text})
    assert Project().required("train.py", "torch").before((1, 11))


@pytest.mark.parametrize(
    ("name", "text", "holds"),
    [
        ("README.md", "    conda install pytorch torchvision pytorch-cuda=11.7 -c pytorch -c nvidia\n", True),
        ("environment.yml", "dependencies:\n  - pytorch\n  - cudatoolkit=11.3\n", True),
        ("envs/training.yml", "dependencies:\n  - pytorch\n  - cudatoolkit=11.3\n", True),
        ("install.sh", "pip install torch --index-url https://download.pytorch.org/whl/cu117\n", True),
        ("install.sh", "pip install torch --index-url https://download.pytorch.org/whl/cu118\n", False),
        ("README.md", "    conda install pytorch cudatoolkit=10.2 && conda install pytorch pytorch-cuda=12.1\n", False),
        ("environment.yml", "dependencies:\n  - pytorch>=1.8\n  - cudatoolkit=11.3\n", False),
        ("environment.yml", "dependencies:\n  - cudatoolkit=11.3\n", False),
        ("environment.yml", "dependencies:\n  - ipython=7.29.0\n  - python=3.7.11\n", True),
        ("environment.yml", "dependencies:\n  - python=3.10\n", False),
        ("README.md", "    conda create -n x python=3.7\n    conda create -n y python=3.11\n", False),
        ("README.md", "    conda create -n x python=3.7 -y\n", True),
        ("CHANGELOG.md", "    conda create -n x python=3.7 -y\n", False),
        ("setup.cfg", "python_requires = >=3.7\n# python = 3.7\n", False),
        ("environment.yml", "dependencies:\n  - cudatoolkit=11.3\n  - pip:\n    - torch\n", False),
        ("Dockerfile", "FROM nvcr.io/nvidia/pytorch:23.05-py3\n", True),
        ("Dockerfile", "FROM nvcr.io/nvidia/pytorch:23.05-py3\nRUN pip install -U torch\n", False),
        ("docker/Dockerfile", "FROM pytorch/pytorch:2.0.1-cuda11.7-cudnn8-devel\n", True),
        ("Dockerfile", "ARG TORCH=1.9.0\nFROM pytorch/pytorch:${TORCH}-cuda11.1-cudnn8-devel\n", True),
        ("docker/train.Dockerfile", "FROM pytorch/pytorch:latest\n", False),
        ("docker/Dockerfile.gpu", "RUN pip install \\\n    torch==2.1.2+cu121 torchvision==0.16.2+cu121\n", True),
        ("Dockerfile", "FROM pytorch/pytorch:2.0.1-cuda11.7-cudnn8-devel\nRUN pip install -U \\\n  torch\n", False),
        ("Dockerfile", "FROM pytorch/pytorch:2.0.1-cuda11.7-cudnn8-devel\nRUN conda install pytorch\n", False),
        ("Dockerfile", "# FROM pytorch/pytorch:1.9.0-cuda11.1-cudnn8-devel\nFROM python:3.12\n", False),
        ("Dockerfile", "FROM pytorch/pytorch:1.9.0-cuda11.1-cudnn8-devel AS old\nFROM python:3.12\n", False),
        ("Dockerfile", "FROM pytorch/pytorch:1.9.0-cuda11.1-cudnn8-devel AS Base\nFROM base\n", True),
        (
            "Dockerfile",
            "ARG BASE=pytorch/pytorch:1.9.0-cuda11.1-cudnn8-devel\nFROM ${BASE}\nRUN conda install -c pytorch faiss\n",
            True,
        ),
        ("requests.txt", "torch==1.8\n", False),
        ("README.md", "    conda create -n x python=3.9\n    conda install pytorch cudatoolkit=11.3\n", True),
    ],
)
def test_the_environment_of_torch_bounds_its_version(name: str, text: str, holds: bool) -> None:
    """There are no builds of torch 2.4 for CUDA 11.7, or for Python 3.7."""
    make({"pyproject.toml": "", name: text})
    assert Project().required("train.py", "torch").before((2, 4)) == holds


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("Install `torch==2.2.0` and `sentencepiece`.", True),
        ("Requirements:\n\n* PyTorch 1.8.1\n", True),
        ("pytorch                   1.7.1<br/>\n", True),
        ("1.10.0 <= pytorch < 2.0.0\n", True),
        ("1.10.0 <= pytorch\n", False),
        ("It was tested under **torch 1.9.0+cu111**.", True),
        ("It needs PyTorch 1.10.0+cu113 and mmcv.", True),
        ("- [PyTorch](https://pytorch.org/) 1.10.0+cu113\n- python 3.8\n", True),
        ("- Python == 3.10, PyTorch == 2.0.1, Install fairseq & SimulEval\n", True),
        ("- torch >= 1.10, < 2.0\n", True),
        ("- `torch==1.10.0`, on Ubuntu\n", True),
        ("- torch==2.0" + ",  a" * 60 + ", 5\n", True),  # at once
        ("- torch == 1.13, torch == 2.0, and torch == 2.5\n", False),
        ("- PyTorch < 2.0, or PyTorch >= 2.4 with FSDP2\n", False),
        ("- [PyTorch 1.8](https://pytorch.org/blog/pytorch-1.8-released/)\n", False),
        ("- Fixed: a crash with numpy, torch == 2.0 works, too\n", False),
        ("PyTorch 1.8 introduced it.", False),
        ("Install `torch>=2.0`.", False),
        ("Checkpoints that were saved with `torch<1.6` can be read.", False),
        ("* PyTorch 1.8.1\r\n* timm\r\n", True),
        ("\uff11.\uff18 <= torch < \uff12.\uff10\n", False),
        ("Measured in nvcr.io/nvidia/pytorch:22.05-py3.", False),
        ("    docker run --rm nvcr.io/nvidia/pytorch:22.05-py3\n", True),
    ],
)
def test_texts_for_readers_give_versions(text: str, holds: bool) -> None:
    """Where a list names torch without a version, too."""
    make({"pyproject.toml": "", "requirements.txt": "torch\n", "README.md": text})
    assert Project().required("train.py", "torch").before((2, 4)) == holds


def test_a_list_in_utf16_gives_versions() -> None:
    """PowerShell writes it: `pip freeze > requirements.txt`."""
    make({"pyproject.toml": ""})
    Path("requirements.txt").write_bytes("timm==0.9\r\ntorch==2.0.0+cu118\r\n".encode("utf-16"))
    assert Project().required("train.py", "torch").before((2, 4))


def test_trees_of_modules_are_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.py").write_text("import torch\nx = torch.float16\n")
    (tmp_path / "pyproject.toml").touch()
    project, path = Project(), str(tmp_path / "train.py")
    project.begin(path)
    found = project.source_of("helper", path)
    assert found is not None
    project.begin(path)
    assert project.source_of("helper", path) is found
    monkeypatch.setattr("mpguard.lint.project.project.MOST_KEPT", 10)
    project.begin(path)
    again = project.source_of("helper", path)
    assert again is not None and again is not found


def test_facts_that_refer_to_the_file_that_is_checked_are_made_again() -> None:
    """Others are kept: they are those that any file gets."""
    make({"pyproject.toml": "", "train.py": "", "shared.py": "import train\n", "other.py": "", "above.py": ""})
    project = Project()
    project.begin("eval.py")
    above, shared, other = (project.source_of(name, "eval.py") for name in ("above", "shared", "other"))
    assert project.source_of("shared", "above.py") is shared
    assert project.source_of("train", "shared.py") is not None
    project.begin("train.py")
    assert project.source_of("other", "train.py") is other is not None
    assert project.source_of("shared", "train.py") is not shared
    assert project.source_of("above", "train.py") is not above, "it refers to it through another"


def test_a_statement_is_parsed_once_for_a_file_and_those_that_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = "def step(scaler, loss):\n    scaler.scale(loss).backward()\n"
    make({"pyproject.toml": "", "steps.py": step, "train.py": "from steps import step\n\nstep(scaler, autocast)\n"})
    parsed: list[str] = []
    parse = incremental.parse
    monkeypatch.setattr(incremental, "parse", lambda code: parsed.append(code) or parse(code))
    engine = Engine(rules(), Options())
    for name in ("steps.py", "train.py"):
        engine.check(Target(name, "python", size=len(step)))
        facts = engine.project.source_of("steps", "train.py")
        assert facts is not None
        facts.need("step")
    assert parsed.count(step) == 1


def test_a_note_names_the_file_of_a_reexported_region() -> None:
    make({
        "pyproject.toml": "",
        "shim.py": "import torch\n\ndef autocast(**kwargs):\n    return torch.autocast('cuda', **kwargs)\n",
        "functional.py": "from shim import autocast\n",
        "train.py": "from functional import autocast\n\nfor x in loader:\n    with autocast(enabled=amp):\n"
        "        loss = model(x).sum()\n        loss.backward()\n    optimizer.step()\n",
    })  # fmt: skip
    engine = Engine(rules(own_only=True), Options(Selectors(select=("MPG301",))))
    (report,) = engine.run([Target("train.py", "python", named=True)])
    (note,) = report.findings[0].notes
    assert note.path is not None and note.start is not None
    assert (Path(note.path).name, note.start[0], note.source) == (
        "shim.py",
        4,
        "    return torch.autocast('cuda', **kwargs)",
    )
