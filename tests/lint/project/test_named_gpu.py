"""The GPU that a project names for a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpguard.lint.project import named_gpu


@pytest.mark.parametrize(("runtime", "found"), [({"gpuType": "T4"}, "T4"), ({}, None)])
def test_colab_names_the_gpu_of_a_notebook(runtime: dict[str, str], found: str | None, tmp_path: Path) -> None:
    notebook = {"cells": [], "metadata": {"accelerator": "GPU", "colab": runtime}, "nbformat": 4, "nbformat_minor": 0}
    (tmp_path / "train.ipynb").write_text(json.dumps(notebook))
    assert named_gpu.gpu(str(tmp_path / "train.ipynb")) == found


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("#SBATCH --gres=gpu:v100:4\npython train.py\n", "v100"),
        ("# Tesla T4 16GB\npython train.py\n", "t4"),
        ("# A100-80GB or H100\npython train.py\n", None),
        ("#SBATCH --gres=gpu:v100:4\npython other_train.py\n", None),
        ("python train.py --data t4_data --name v100x\n", None),
    ],
)
def test_a_script_that_starts_a_file_names_its_gpu(script: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import torch\n")
    (tmp_path / "run.sh").write_text(script)
    assert named_gpu.gpu(str(tmp_path / "scripts" / "train.py")) == found
