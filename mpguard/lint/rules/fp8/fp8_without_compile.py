from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    Good,
    Note,
    Rule,
    Scope,
    any_of,
    dotted,
    fp8_facts,
    launched_compiled,
    python_edits,
)

_COMPILES_OPTIMIZER = {
    "pyproject.toml": "",
    "helpers.py": """\
import torch

def build_optimizer(model):
    opt = torch.optim.AdamW(model.parameters())
    opt.step = torch.compile(opt.step)
    return opt

def load_checkpoint(model):
    _unwrap_compiled(model).load_state_dict(torch.load("last.pt"))

def _unwrap_compiled(model):
    return getattr(model, "_orig_mod", model)

def compile_model(model):
    return torch.compile(model)
""",
}

#: An optimizer that compiles a function of its own, and a class that may compile the model.
_COMPILES_OWN = {
    "pyproject.toml": "",
    "own.py": """\
import torch

def whiten(gradient):
    return gradient / gradient.norm()

class Whitened(torch.optim.Optimizer):
    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.whiten = torch.compile(whiten)

class Runner:
    def __init__(self, net):
        self.run = torch.compile(net)
""",
}


#: A program that lets an object convert the model that it trains.
_TRAINS_CONVERTED = """\
import torch
from converter import Converter

def main(args, loader):
    model = torch.nn.Linear(1024, 1024)
    Converter(args.fp8).convert(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""


class Fp8WithoutCompile(Rule):
    """torchao's float8 training without `torch.compile` is slower than plain BF16.

    ## What it does
    Reports `torchao.float8.convert_to_float8_training` and accelerate's `AORecipeKwargs` if nothing in the file, in
    what it imports from its own tree, or in its launch config compiles the model.

    ## Why is this bad
    torchao casts and scales in PyTorch operations that only the compiler fuses into the matrix multiplications.
    Measured on an H200: FP8 without compile runs at 0.55 times the speed of plain BF16; with compile it is faster than
    BF16. The loss is the same, so only the speed shows it.

    ## Fix safety
    The fix compiles the model after the conversion (`dynamo_backend="inductor"` for Accelerate). It is unsafe:
    compilation takes minutes at the start, recompiles for new shapes, and a few models do not compile.

    ## Known limits
    A compile that an option enables counts. A helper that converts a model of its caller is not checked if no caller is
    in the linted files, unless it trains the model and nothing in the project compiles. Transformer Engine needs no
    compile and is never reported. FP8 that is only emulated (`emulate=True`) is not checked. A launch flag
    (`accelerate launch --dynamo_backend inductor`) is not seen. An `Accelerator(**arguments)` is not reported, since
    the arguments may contain a dynamo backend.
    """

    code, name = "MPG401", "fp8-without-compile"
    severity = "error"
    message = "torchao float8 without `torch.compile`: about half the speed of plain BF16"
    help = "compile the model, in the code or by a launch flag such as --dynamo_backend"
    triggers = (any_of(b"convert_to_float8_training", b"AORecipeKwargs"),)
    examples = (
        Bad(
            """\
import os

import torch
from torchao.float8 import convert_to_float8_training

torch_compile = 0
torch_compile = int(os.environ.get("TORCH_COMPILE", torch_compile))
model = torch.nn.Linear(1024, 1024)
if torch_compile:
    print("compiled")
convert_to_float8_training(model)  # !
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
            fixed="""\
import os

import torch
from torchao.float8 import convert_to_float8_training

torch_compile = 0
torch_compile = int(os.environ.get("TORCH_COMPILE", torch_compile))
model = torch.nn.Linear(1024, 1024)
if torch_compile:
    print("compiled")
convert_to_float8_training(model)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from attention import Attention


def train(loader):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), Attention(1024))
    convert_to_float8_training(model)  # !
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
            name="train.py",
            files={
                "pyproject.toml": "",
                "attention.py": "import torch\nfrom torch.nn.attention.flex_attention import flex_attention\n\n\n"
                "class Attention(torch.nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
                "        self.sdpa = torch.compile(flex_attention, dynamic=False)\n\n"
                "    def forward(self, x):\n        return self.sdpa(x, x, x)\n",
            },
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training
from attention import Attention


def train(loader):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), Attention(1024))
    convert_to_float8_training(model)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

model = torch.nn.Linear(1024, 1024).cuda()
convert_to_float8_training(model)  # !
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

model = torch.nn.Linear(1024, 1024).cuda()
convert_to_float8_training(model)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
        ),
        Bad(
            """\
import re
import torch
import torchao.float8 as float8
from project import build

def main(args):
    pattern = re.compile("lm_head")
    if args.fp8:
        model = float8.convert_to_float8_training(build(args), module_filter_fn=None)  # !
    else:
        model = torch.compile(build(args))
    return model
""",
            fixed="""\
import re
import torch
import torchao.float8 as float8
from project import build

def main(args):
    pattern = re.compile("lm_head")
    if args.fp8:
        model = float8.convert_to_float8_training(build(args), module_filter_fn=None)
        model = torch.compile(model)
    else:
        model = torch.compile(build(args))
    return model
""",
        ),
        Bad(
            """\
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])  # !
""",
            fixed="""\
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()], dynamo_backend="inductor")
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from data import build, loader

model, teacher = build().cuda(), torch.nn.Linear(16, 16).cuda()
for block in model.blocks:
    convert_to_float8_training(block)  # !
torch.compile(model)  # its result is dropped
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

model = torch.nn.Linear(16, 16).cuda()
teacher = torch.nn.Linear(16, 16).cuda()
convert_to_float8_training(model)  # !
teacher = torch.compile(teacher)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    (model(x) - teacher(x)).sum().backward()
    optimizer.step()
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

model = torch.nn.Linear(16, 16).cuda()
teacher = torch.nn.Linear(16, 16).cuda()
convert_to_float8_training(model)
model = torch.compile(model)
teacher = torch.compile(teacher)
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    (model(x) - teacher(x)).sum().backward()
    optimizer.step()
""",
        ),
        Bad(
            """\
import lightning
import torch
from torchao.float8 import convert_to_float8_training

class Module(lightning.LightningModule):
    def configure_model(self):
        self.net = torch.nn.Linear(16, 16)
        convert_to_float8_training(self.net)  # !

    def training_step(self, batch, index):
        return self.net(batch).sum()

lightning.Trainer().fit(Module())
""",
            fixed="""\
import lightning
import torch
from torchao.float8 import convert_to_float8_training

class Module(lightning.LightningModule):
    def configure_model(self):
        self.net = torch.nn.Linear(16, 16)
        convert_to_float8_training(self.net)
        self.net = torch.compile(self.net)

    def training_step(self, batch, index):
        return self.net(batch).sum()

lightning.Trainer().fit(Module())
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def zeropower(g):
    return g / g.norm()

zeropower_compiled = torch.compile(zeropower)
use_compile = False
model = torch.nn.Linear(4096, 4096).cuda()
convert_to_float8_training(model)  # !
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if not use_compile:
    print("evaluates", use_compile)
model(torch.randn(8, 4096)).sum().backward()
optimizer.step()
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

def zeropower(g):
    return g / g.norm()

zeropower_compiled = torch.compile(zeropower)
use_compile = False
model = torch.nn.Linear(4096, 4096).cuda()
convert_to_float8_training(model)
model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if not use_compile:
    print("evaluates", use_compile)
model(torch.randn(8, 4096)).sum().backward()
optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(1024, 1024)
        self.head = torch.nn.Linear(1024, 16)

def train(loader):
    model = Net().cuda()
    convert_to_float8_training(model.backbone)  # !
    model.head = torch.compile(model.head)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(1024, 1024)
        self.head = torch.nn.Linear(1024, 16)

def train(loader):
    model = Net().cuda()
    convert_to_float8_training(model.backbone)
    model.backbone = torch.compile(model.backbone)
    model.head = torch.compile(model.head)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def distil(student, teacher, loader):
    convert_to_float8_training(student)  # !
    teacher = torch.compile(teacher.eval())
    optimizer = torch.optim.AdamW(student.parameters())
    for x in loader:
        (student(x) - teacher(x).detach()).pow(2).mean().backward()
        optimizer.step()

distil(make("small"), make("large"), loader)
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

def distil(student, teacher, loader):
    convert_to_float8_training(student)
    student = torch.compile(student)
    teacher = torch.compile(teacher.eval())
    optimizer = torch.optim.AdamW(student.parameters())
    for x in loader:
        (student(x) - teacher(x).detach()).pow(2).mean().backward()
        optimizer.step()

distil(make("small"), make("large"), loader)
""",
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def train_step(model, x):
    return model(x).sum()

model = torch.nn.Linear(4096, 4096).cuda()
convert_to_float8_training(model)
step = torch.compile(train_step)
step(model, torch.randn(8, 4096)).backward()
"""
        ),
        Good(
            """\
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

def helper(model):
    convert_to_float8_training(model)

def on_cpu():
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(torch.nn.Linear(16, 16), config=config)

def train(args, loader):
    model = torch.nn.Linear(1024, 1024).cuda()
    convert_to_float8_training(model)
    if args.compile:
        model = torch.compile(model)

def engine(loader):
    model = te.Linear(1024, 1024)
    with te.autocast():
        model(loader).sum().backward()
"""
        ),
        Good(
            """\
import torch
import yaml
from torchao.float8 import convert_to_float8_training
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("x")
convert_to_float8_training(model)
Trainer(model, TrainingArguments(**yaml.safe_load(open("c.yaml")))).train()
"""
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def count_float8_layers():
    model = torch.nn.Linear(16, 16)
    convert_to_float8_training(model)
    return sum(1 for _ in model.modules())
"""
        ),
        Good(
            """\
from accelerate.utils import AORecipeKwargs

def handlers(arguments):
    return [AORecipeKwargs(module_filter_func=keep)] if arguments.fp8 else []
"""
        ),
        Good(
            """\
from accelerate.utils import AORecipeKwargs
from transformers import Trainer

class Fp8Trainer(Trainer):
    def handlers(self):
        return [AORecipeKwargs()]
"""
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def run(mode, loader):
    model = torch.nn.Linear(1024, 1024)
    if mode is None:
        convert_to_float8_training(model)  # !
    if mode not in (None, "off"):
        model = torch.compile(model)
    for x in loader:
        model(x).sum().backward()
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

def run(mode, loader):
    model = torch.nn.Linear(1024, 1024)
    if mode is None:
        convert_to_float8_training(model)
        model = torch.compile(model)
    if mode not in (None, "off"):
        model = torch.compile(model)
    for x in loader:
        model(x).sum().backward()
""",
        ),
        Good(
            """\
import copy
import torch
from torchao.float8 import convert_to_float8_training

def run(plain, recipe, other, convert_otherwise, loader):
    assert not (recipe is not None and other is not None)
    assert other in (None, "mxfp8")
    if recipe is not None:
        model = convert_to_float8_training(copy.deepcopy(plain), config=recipe)
    else:
        assert other is not None
        model = copy.deepcopy(plain)
        convert_otherwise(model)
    model = torch.compile(model)
    for x in loader:
        model(x).sum().backward()

run(torch.nn.Linear(1024, 1024), "rowwise", None, None, load())
"""
        ),
        Good(
            """\
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(
    mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()], dynamo_backend="inductor"
)
"""
        ),
        Good(
            """\
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

arguments = {"kwargs_handlers": [AORecipeKwargs()]}
if backend:
    arguments["dynamo_backend"] = backend
accelerator = Accelerator(**arguments)
"""
        ),
        Good(
            """\
from torchao.float8 import convert_to_float8_training
from speed import faster
from models import build

model = build()
convert_to_float8_training(model)
model = faster(model)
""",
            files={
                "speed.py": "import torch\n\ndef faster(model):\n    model.compile()\n    return model\n",
                "pyproject.toml": "",
            },
        ),
        Good(
            """\
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(kwargs_handlers=[AORecipeKwargs()])
""",
            files={
                "mp.yaml": "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n"
                "dynamo_config:\n  dynamo_backend: INDUCTOR\n",
            },
        ),
        Bad(
            """\
from torchao.float8 import convert_to_float8_training
from parallel import wrap
from parts import configure_optimizer, load_model

def main(loader):
    model = load_model()
    convert_to_float8_training(model)  # !
    model = wrap(model)
    optimizer = configure_optimizer(model)
    for x in loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
""",
            files={
                "pyproject.toml": "",
                "parallel.py": "def wrap(model):\n    return model\n",
                "parts.py": "import torch\n\ndef load_model():\n    model = torch.nn.Linear(16, 16)\n"
                "    return model.to('cuda')\n\ndef configure_optimizer(model):\n"
                "    parts = [p for _, p in model.named_parameters()]\n    return torch.optim.AdamW(parts)\n",
            },
        ),
        Bad(
            """\
import argparse
import dataclasses

import torch
from torchao.float8 import convert_to_float8_training

@dataclasses.dataclass
class Config:
    lr: float = 0.1
    compile: bool = False

def set_compile_mode(mode):
    print(mode)

def main(config, loader):
    model = torch.nn.Linear(16, 16)
    convert_to_float8_training(model)  # !
    set_compile_mode(config.compile)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
main(Config(compile=args.compile), load())
""",
            fixed="""\
import argparse
import dataclasses

import torch
from torchao.float8 import convert_to_float8_training

@dataclasses.dataclass
class Config:
    lr: float = 0.1
    compile: bool = False

def set_compile_mode(mode):
    print(mode)

def main(config, loader):
    model = torch.nn.Linear(16, 16)
    convert_to_float8_training(model)
    model = torch.compile(model)
    set_compile_mode(config.compile)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
main(Config(compile=args.compile), load())
""",
        ),
        Bad(
            """\
import torch
from framework import Workflow
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchao.float8 import convert_to_float8_training

class Training(Workflow):
    def model(self, mesh):
        model = torch.nn.Linear(16, 16)
        parallelize_module(model, mesh, ColwiseParallel())
        return convert_to_float8_training(model)  # !

    def train(self, mesh, loader, args):
        model = self.model(mesh)
        optimizer = make_optimizer(model, compile_optimizer=args.compile)
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
""",
        ),
        Good(
            """\
import torch
from framework import Workflow
from torchao.float8 import convert_to_float8_training

class Training(Workflow):
    def model(self):
        return convert_to_float8_training(torch.nn.Linear(16, 16))

    def loss(self, model, x):
        return model(x).sum()
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from transformers import HfArgumentParser, TrainingArguments

def main(loader):
    args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = torch.nn.Linear(16, 16)
    convert_to_float8_training(model)  # !
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training
from transformers import HfArgumentParser, TrainingArguments

def main(loader):
    args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = torch.nn.Linear(16, 16)
    convert_to_float8_training(model)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def prepare_compile(model, use_compile):
    return torch.compile(model) if use_compile else model

def main(args, loader):
    model = torch.nn.Linear(16, 16)
    convert_to_float8_training(model)
    run = prepare_compile(model, args.compile)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        run(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from helpers import build_optimizer, load_checkpoint

def main(args, loader, step):
    model = torch.nn.Linear(1024, 1024)
    optimizer = build_optimizer(model)
    convert_to_float8_training(model)  # !
    load_checkpoint(model)
    for x in loader:
        step(model, x).backward()
        optimizer.step()
""",
            files=_COMPILES_OPTIMIZER,
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training
from helpers import build_optimizer, load_checkpoint

def main(args, loader, step):
    model = torch.nn.Linear(1024, 1024)
    optimizer = build_optimizer(model)
    convert_to_float8_training(model)
    model = torch.compile(model)
    load_checkpoint(model)
    for x in loader:
        step(model, x).backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def main(loader, epoch, forward):
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_to_float8_training(model)  # !
    epoch(forward, optimizer, loader)
""",
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

def main(loader, epoch, forward):
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_to_float8_training(model)
    model = torch.compile(model)
    epoch(forward, optimizer, loader)
""",
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from helpers import build_optimizer, compile_model

def main(args, loader, step):
    model = torch.nn.Linear(1024, 1024)
    optimizer = build_optimizer(model)
    convert_to_float8_training(model)
    model = compile_model(model)
    for x in loader:
        step(model, x).backward()
        optimizer.step()
""",
            files=_COMPILES_OPTIMIZER,
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def train(args, model, loader):
    convert_to_float8_training(model)  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            name="trainer.py",
            files={
                "pyproject.toml": "",
                "run.py": "import re\nfrom trainer import train\n\nname = re.compile('a')\n"
                "TRAINERS = {'plain': train}\nTRAINERS[args.kind](args, build(name), loader)\n",
            },
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

def train(args, model, loader):
    convert_to_float8_training(model)
    model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def train(args, model, loader):
    convert_to_float8_training(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            name="trainer.py",
            files={
                "pyproject.toml": "",
                "run.py": "from trainer import train\n\nTRAINERS = {'plain': train}\n"
                "model = build()\nmodel.compile()\nTRAINERS[args.kind](args, model, loader)\n",
            },
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def train(args, model, loader):
    convert_to_float8_training(model)  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            name="trainer.py",
            files={"pyproject.toml": "[project]\nname = 'trainers'\n"},
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training

def train(args, model, loader):
    convert_to_float8_training(model)
    model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

def train(args, model, loader):
    convert_to_float8_training(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            name="trainer.py",
            files={
                "pyproject.toml": "[project]\nname = 'trainers'\n",
                "run.py": "import torch\nfrom trainer import train\n\ntrain(args, torch.compile(net), loader)\n",
            },
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from own import Whitened

model = torch.nn.Linear(1024, 1024)
convert_to_float8_training(model)  # !
optimizer = torch.optim.AdamW(model.parameters())
other = Whitened(model)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
            files=_COMPILES_OWN,
            fixed="""\
import torch
from torchao.float8 import convert_to_float8_training
from own import Whitened

model = torch.nn.Linear(1024, 1024)
convert_to_float8_training(model)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
other = Whitened(model)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training
from own import Runner

model = torch.nn.Linear(1024, 1024)
convert_to_float8_training(model)
optimizer = torch.optim.AdamW(model.parameters())
other = Runner(model)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
            files=_COMPILES_OWN,
        ),
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

class Converter:
    def __init__(self, enabled):
        self.enabled = enabled

    def convert(self, model):
        if self.enabled:
            convert_to_float8_training(model)  # !
""",
            name="converter.py",
            files={"pyproject.toml": "", "train.py": _TRAINS_CONVERTED},
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

class Converter:
    def __init__(self, enabled):
        self.enabled = enabled

    def convert(self, model):
        if self.enabled:
            convert_to_float8_training(model)
""",
            name="converter.py",
            files={
                "pyproject.toml": "",
                "train.py": _TRAINS_CONVERTED.replace("    optimizer", "    model.compile()\n    optimizer"),
            },
        ),
        Good(
            """\
import torch
from torchao.float8 import convert_to_float8_training

class Converter:
    def __init__(self, enabled):
        self.enabled = enabled

    def convert(self, model):
        if self.enabled:
            convert_to_float8_training(model)
""",
            name="converter.py",
            files={
                "pyproject.toml": "",
                "save.py": "import torch\nfrom converter import Converter\n\nmodel = torch.nn.Linear(16, 16)\n"
                "Converter(True).convert(model)\ntorch.save(model.state_dict(), 'converted.pt')\n",
            },
        ),
        Bad(
            """\
import lightning as L
from torchao.float8 import convert_to_float8_training

class Float8(L.Callback):
    def setup(self, trainer, pl_module, stage):
        convert_to_float8_training(pl_module.model)  # !
""",
            name="callbacks.py",
            files={
                "pyproject.toml": "",
                "train.py": "import lightning as L\nfrom callbacks import Float8\n\n"
                "L.Trainer(callbacks=[Float8()]).fit(model, loader)\n",
            },
        ),
        Good(
            """\
import lightning as L
from torchao.float8 import convert_to_float8_training

class Float8(L.Callback):
    def setup(self, trainer, pl_module, stage):
        convert_to_float8_training(pl_module.model)
""",
            name="callbacks.py",
            files={
                "pyproject.toml": "",
                "train.py": "import lightning as L\nimport torch\nfrom callbacks import Float8\n\n"
                "L.Trainer(callbacks=[Float8()]).fit(torch.compile(model), loader)\n",
            },
        ),
        Good(
            """\
from torchao.float8 import convert_to_float8_training

from registry import register

@register("net")
def build(config):
    model = Model(config)
    convert_to_float8_training(model)
    return model
""",
            name="models.py",
            files={
                "pyproject.toml": "",
                "registry.py": "MODELS = {}\n",
                "train.py": "from registry import MODELS\n\nMODELS[name](config).blocks[0].compile(fullgraph=True)\n",
            },
        ),
        Good(
            """\
from torchao.float8 import convert_to_float8_training

def build(config):
    model = Model(config)
    convert_to_float8_training(model)
    return model

MODELS = {"net": build}
""",
            name="models.py",
            files={
                "pyproject.toml": "",
                "registry.py": "MODELS = {}\n",
                "train.py": "from models import MODELS\n\nMODELS[name](config).blocks[0].compile(fullgraph=True)\n",
            },
        ),
        Bad(
            """\
from torchao.float8 import convert_to_float8_training

from registry import register

@register("net")
def build(config):
    model = Model(config)
    convert_to_float8_training(model)  # !
    return model
""",
            name="models.py",
            files={
                "pyproject.toml": "",
                "registry.py": "MODELS = {}\n",
                "train.py": "import models\nfrom registry import MODELS\n\nmodel = MODELS[name](config)\nfit(model)\n",
            },
        ),
        # A trainer converts the model that it gets and keeps.
        Bad(
            """\
import torch
from torchao.float8 import convert_to_float8_training

class Trainer:
    def __init__(self, model, lr=1e-3):
        self.model = model
        convert_to_float8_training(model)  # !
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def train(self, loader):
        for x in loader:
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()
""",
            files={"pyproject.toml": ""},
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        found = [
            event
            for event in facts.events("convert")
            if not self._is_outside(event, facts) and not fp8_facts.emulated(facts, event.call)
        ]
        accelerators = facts.events("accelerator")
        # Handlers of a helper may go to an Accelerator that compiles; `**arguments` may contain a dynamo backend.
        if accelerators and not any(event.call.starred for event in accelerators):
            found += [each for each in facts.events("fp8_handler") if _is_torchao_handler(each)]
        if not found or launched_compiled(facts):
            return
        for event in found:
            call = event.call
            if facts.is_inference(call) or self._base_may_compile(call, facts) or self._is_compiled(event, facts):
                continue
            note = Note(
                "with Accelerate, a launch flag (`--dynamo_backend inductor`) that is not visible here may set it"
            )
            yield self.at(call, notes=(note,) if _is_torchao_handler(event) else (), fix=self._fix(event, facts))

    def _is_outside(self, event: Event, facts: Facts) -> bool:
        """True if the model may be compiled elsewhere, or is not trained.

        It belongs to a caller that is not in the linted files, or is local to a function that only converts it. A model
        that a function trains is compiled by none of its callers if nothing in the project compiles.
        """
        if event.subject is None:
            return True
        if facts.from_outside(event.subject, event.call):
            trained = self._is_trained_here(event, facts) or _is_callback(event.call, facts)
            return not trained or facts.project.compiled_elsewhere(facts.path)
        local = event.scope.kind == "function" and event.call.is_statement and "." not in event.key
        if not local or not event.key:
            return False
        if self._is_looped(event, facts) or self._is_trained_here(event, facts):
            return False  # the function trains, so it is no helper that only converts
        if any(facts.kinds(each.node, each) & {"optimizer", "own_optimizer"} for each in event.scope.calls):
            return False  # nor does a helper make an optimizer
        if self._is_given(event, facts) and facts.training_use.trainer_of(event.call) is not None:
            return False  # a program that calls it trains: all callers are known
        reach = facts.flow.forward_key(event.key, event.call)
        return not reach.sinks and not reach.outside

    def _is_trained_here(self, event: Event, facts: Facts) -> bool:
        """True if the function trains, or another method of a class that converts itself or what an attribute holds."""
        of_object = event.key.partition(".")[0] == "self" or self._is_stored(event)
        owner = event.scope.owner if of_object else None
        return any(
            each.scope is event.scope or (owner is not None and each.scope.owner is owner)
            for each in facts.events("backward")
        )

    def _is_stored(self, event: Event) -> bool:
        """True if an attribute of the object holds the converted module."""
        return any(
            key.startswith("self.") and dotted(each.value) == event.key
            for key, bound in event.scope.bindings.items()
            for each in bound
        )

    def _is_given(self, event: Event, facts: Facts) -> bool:
        """True if the converted module is a parameter of the function."""
        return any(binding.kind == "param" for binding in facts.bindings(event.key, event.call))

    def _is_looped(self, event: Event, facts: Facts) -> bool:
        """True if the converted module is the variable of a loop."""
        return any(binding.kind == "for" for binding in facts.bindings(event.key, event.call))

    def _base_may_compile(self, call: Call, facts: Facts) -> bool:
        """True if a base class that is not in the tree may compile.

        Lightning does not, around `configure_model`, nor does the base of a class with a training loop of its own.
        """
        owner = call.scope.owner
        if owner is None or not facts.base_unknown(owner):
            return False
        if _is_callback(call, facts):
            return False
        lightning = any(base.endswith(".LightningModule") for base in facts.ancestry(owner))
        steps = [*facts.events("step"), *facts.events("scaler_step")]
        own_loop = all(any(each.scope.owner is owner for each in found) for found in (facts.events("backward"), steps))
        return not own_loop and not (lightning and call.scope.name == "configure_model")

    def _is_compiled(self, event: Event, facts: Facts) -> bool:
        call = event.call
        return (
            facts.compiles(facts.guard_of(call), event)
            or facts.compiled_by(self._same_run(call.scope, facts), event)
            or (self._is_given_away(call, facts) and facts.project.compiled_elsewhere(facts.path))
        )

    def _is_given_away(self, call: Call, facts: Facts) -> bool:
        """True if nothing known trains what a function makes, which other code gets from a registry or by a name."""
        scope = next((each for each in call.scope.within() if each.kind == "function"), None)
        return (
            scope is not None
            and any(
                each.decorators or (each.owner is None and (facts.escapes(each) or facts.of(each).exported(each.name)))
                for each in facts.programs_of(scope)
                if each.kind == "function" and not facts.callers(each)
            )
            and facts.training_use.trainer_of(call) is None
        )

    def _same_run(self, scope: Scope, facts: Facts) -> set[Scope]:
        """Return the functions around a scope: those that lead to it by calls, and all that these call.

        Other scripts that share a helper with it are not among them.
        """
        above, pending = {scope}, [scope]
        while pending:
            current = pending.pop()
            outer = [each.scope for each in facts.callers(current)] if current.kind == "function" else []
            outer += [current.parent] if current.parent is not None else []
            outer += list(current.descendants()) if current.kind == "class" else []
            pending += [each for each in dict.fromkeys(outer) if each not in above]
            above.update(outer)
        found, pending = set(above), list(above)
        while pending:
            inner = [function.scope for each in pending.pop().calls for function in facts.functions(each)]
            pending += [each for each in dict.fromkeys(inner) if each not in found]
            found.update(inner)
        return found

    def _fix(self, event: Event, facts: Facts) -> Fix | None:
        call = event.call
        if _is_torchao_handler(event):
            return self._fix_accelerator(call, facts)
        if self._is_looped(event, facts):
            return None  # another value of the loop's variable changes no block
        if self._is_given(event, facts) and (self._is_stored(event) or not self._is_trained_here(event, facts)):
            return None  # the caller, or the object, keeps the module that it has
        torch = python_edits.name_of_torch(facts)
        statement = call.statement
        if isinstance(statement, cst.Assign) and statement.value is call.node and len(statement.targets) == 1:
            model = dotted(statement.targets[0].target)
        else:
            model = dotted(call.argument(0, "module")) if call.is_statement else ""
        if torch is None or not model or not isinstance(call.line, cst.SimpleStatementLine):
            return None
        edit = python_edits.line_after(facts, call.line, call, f"{model} = {torch}.compile({model})")
        return Fix("Compile the model after the conversion", "unsafe", (edit,))

    def _fix_accelerator(self, call: Call, facts: Facts) -> Fix | None:
        made = [event.call for event in facts.events("accelerator") if event.scope is call.scope]
        if len(made) != 1 or made[0].starred or not made[0].node.args:
            return None
        edit = python_edits.with_argument(facts, made[0], 'dynamo_backend="inductor"')
        return Fix("Let Accelerate compile the model", "unsafe", (edit,))


def _is_torchao_handler(event: Event) -> bool:
    """True if an event is accelerate's handler for torchao."""
    return event.kind == "fp8_handler" and event.facts.called_path(event.call).endswith(".AORecipeKwargs")


def _is_callback(call: Call, facts: Facts) -> bool:
    """True in a callback of Lightning, which gets the module that its Trainer trains; Lightning does not compile it."""
    owner = call.scope.owner
    bases = facts.ancestry(owner) if owner is not None else ()
    return any(base.endswith(".Callback") and "lightning" in base for base in bases)
