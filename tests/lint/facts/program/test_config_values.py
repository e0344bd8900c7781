"""The settings that code reads from configs of its tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.lint.facts.file import Facts
from mpguard.lint.facts.program.lattice import Constant
from mpguard.lint.project.project import Project
from mpguard.lint.source.source import Source

HYDRA = "import hydra\n@hydra.main(config_path='conf', config_name='main')\ndef main(cfg):\n    "
FILES = {
    "run.yaml": "model:\n  dtype: bf16\n  layers: [1, 2]\n",
    "configs/run.json": '{"model": {"dtype": "fp16"}}',
    "conf/main.yaml": "defaults:\n  - base\n  - model: small\n  - _self_\nlr: 2\n",
    "conf/base.yaml": "lr: 1\nseed: 3\n",
    "conf/model/small.yaml": "dtype: bf16\n",
    "list.yaml": "- 1\n",
    "pyproject.toml": "",
}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import yaml\nuse(yaml.safe_load(open('run.yaml'))['model']['dtype'])", ["bf16"]),
        (
            "import yaml\nwith open('run.yaml') as f:\n    c = yaml.load(f, yaml.Loader)\nuse(c['model']['dtype'])",
            ["bf16"],
        ),
        ("import json\nfrom pathlib import Path\nuse(json.loads(Path('run.json').read_text())['model'])", []),
        (
            "import json, os\nuse(json.load(open(os.path.join(HERE, 'configs/run.json')))['model'].get('dtype'))",
            ["fp16"],
        ),
        ("from omegaconf import OmegaConf\nuse(OmegaConf.load('run.yaml').model.dtype)", ["bf16"]),
        (
            "import yaml\nfrom easydict import EasyDict\nuse(EasyDict(yaml.safe_load(open('run.yaml'))).model.dtype)",
            ["bf16"],
        ),
        (
            "import yaml\ndef read(p):\n    return yaml.safe_load(open(p))\nuse(read('run.yaml')['model']['dtype'])",
            ["bf16"],
        ),
        (
            "import argparse, yaml\np = argparse.ArgumentParser()\np.add_argument('--config', default='run.yaml')\n"
            "args = p.parse_args()\nuse(yaml.safe_load(open(args.config))['model']['dtype'])",
            ["bf16"],
        ),
        (HYDRA + "use(cfg.model.dtype)", ["bf16"]),
        (HYDRA + "use(cfg.lr)", [2]),
        (HYDRA + "use(cfg.seed)", [3]),
        # Unknown: no such key, no such file, a list, a file that is not named, a loader of something else.
        (HYDRA + "use(cfg.model.width)", []),
        ("import yaml\nuse(yaml.safe_load(open('other.yaml'))['model'])", []),
        ("import yaml\nuse(yaml.safe_load(open('list.yaml'))[0])", []),
        ("import yaml, sys\nuse(yaml.safe_load(open(sys.argv[1]))['model']['dtype'])", []),
        ("import pickle\nuse(pickle.load(open('run.yaml'))['model']['dtype'])", []),
    ],
)
def test_settings(code: str, expected: list[object], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    facts = Facts(Source.parse(code.encode(), str(tmp_path / "train.py")), Project())
    (call,) = facts.calls["use"]
    found = [each.atom for each in facts.evaluate(call.positional[0], call)]
    assert [each.value for each in found if isinstance(each, Constant)] == expected
    assert facts.constants(call.positional[0], call) == [], "another config may give another value"
