from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Diagnostic, Dtype, Event, Facts, Good, Note, Rule, any_of

_SHARDED_CHECKPOINTS = {
    "pyproject.toml": "",
    "checkpoints.py": """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

FSDP_STRATEGIES = ("full", "grad")

def rank():
    return dist.get_rank()

def shard(model):
    return FSDP(model)

def load_checkpoint(path, model, optimizer):
    inner = unwrap(model)
    inner.load_state_dict(torch.load(path))

def unwrap(model):
    return model.module if isinstance(model, FSDP) else model
""",
}

#: A program of diffusers, before and after the casts to the dtype that the launcher's precision gives.
_LOADS = """\
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, UNet2DConditionModel

def train(name, loader):
    accelerator = Accelerator()
    vae = AutoencoderKL.from_pretrained(name)
    unet = UNet2DConditionModel.from_pretrained(name)
    vae.requires_grad_(False)
    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
"""
_TRAINS = """\
    optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-5)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    for x in loader:
        loss = unet(vae.encode(x.to(weight_dtype))).mean()
        accelerator.backward(loss)
        optimizer.step()
"""


class NoMasterWeights(Rule):
    """All parameters are BF16 and a plain optimizer updates them.

    ## What it does
    Reports a model that is cast to BF16, or loaded in BF16, if its parameters are passed to an optimizer of torch,
    bitsandbytes or torchao that updates them in place.

    ## Why is this bad
    BF16 has 8 bits of precision: an update below 2^-9 of a weight (0.2 %) is rounded away. Adam moves a weight by about
    the learning rate; with 1e-5, no weight above 0.005 changes. Mixed precision keeps FP32 master weights: load in FP32
    and use BF16 autocast, or FSDP's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.

    ## Known limits
    Silent for adapters, quantized loads and frozen models; for optimizers with stochastic rounding
    (`bf16_stochastic_round=True`), Kahan summation or FP32 masters, which are not among the recognized ones; and where
    the functions that train the model, other than those for checkpoints, mention DeepSpeed, FSDP or Megatron, whose
    optimizers may keep masters. A Trainer
    is checked if its `TrainingArguments` are in the file, or parsed by `HfArgumentParser` from launch lines in the tree
    that are fully known.
    """

    code, name = "MPG107", "no-master-weights"
    severity = "warning"
    message = "`{expr}` makes the weights {dtypes}, and a plain optimizer updates them"
    help = "keep the weights in FP32 and compute in BF16 by autocast, or use an optimizer with stochastic rounding"
    triggers = (
        any_of(b"bfloat16", b"bf16", b"DTYPE"),
        any_of(b".bfloat16()", b".to(", b".type(", b"dtype"),
    )
    triggers_nearby = (
        any_of(b"bfloat16", b"bf16", b"DTYPE"),
        any_of(b"optim", b"Trainer("),
        any_of(b".step(", b".train("),
        any_of(b"arameters()", b"Trainer("),
    )
    yields_to = ("MPG511",)
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).to("cuda", torch.bfloat16)  # !
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
        ),
        Bad(
            """\
import bitsandbytes as bnb
import torch
from torchao.optim import AdamW8bit
from transformers import AutoModel, Trainer, TrainingArguments

class Run:
    def __init__(self):
        self.model = AutoModel.from_pretrained("x", torch_dtype="bfloat16")  # !
        self.optimizer = bnb.optim.AdamW8bit(self.model.parameters())

    def step(self, x):
        self.model(x).sum().backward()
        self.optimizer.step()

def in_place(model, loader):
    model.bfloat16()  # !
    optimizer = AdamW8bit(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def in_parts(model, loader):
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def trainer(data):
    model = AutoModel.from_pretrained("x", dtype=torch.bfloat16)  # !
    Trainer(model, TrainingArguments("out", bf16=True), train_dataset=data).train()

def eight_bit(data):
    model = AutoModel.from_pretrained("x", dtype=torch.bfloat16)  # !
    Trainer(model=model, args=TrainingArguments("out", optim="paged_adamw_8bit"), train_dataset=data).train()
"""
        ),
        Bad(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

def train(loader):
    model = torch.nn.Linear(8, 8).bfloat16()  # !
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def sharded(loader):
    model = FSDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from transformers import AutoModel, HfArgumentParser, Trainer, TrainingArguments

def main(data):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModel.from_pretrained("x", dtype=torch.bfloat16)  # !
    Trainer(model, args, train_dataset=data).train()
""",
            files={"run.sh": "torchrun --nproc_per_node 8 example.py --bf16 True --learning_rate 1e-5\n"},
        ),
        Bad(
            """\
import torch

class ShardedOptimizer:
    def __init__(self, inner, to_fp32=True):
        self.inner = inner
        for group in inner.param_groups:
            group["params"] = [p.detach().clone().float() if to_fp32 else p for p in group["params"]]

    def step(self):
        self.inner.step()

def train(model, loader):
    model = model.cuda().bfloat16()  # !
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()), to_fp32=False)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM

def shard(model):
    return FSDP(model)

def distil(loader):
    teacher = shard(AutoModelForCausalLM.from_pretrained("large"))
    student = AutoModelForCausalLM.from_pretrained("small", dtype=torch.bfloat16)  # !
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)
    for x in loader:
        loss = (student(x).logits - teacher(x).logits.detach()).pow(2).mean()
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

class ShardedOptimizer:
    def __init__(self, inner):
        self.inner = inner
        for group in inner.param_groups:
            group["params"] = [p.detach().clone().float() for p in group["params"]]

    def step(self):
        self.inner.step()

def train(model, loader):
    model = model.cuda().bfloat16()
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

class ShardedOptimizer:
    def __init__(self, inner):
        self.inner = inner
        for group in inner.param_groups:
            group["params"] = [p for p in group["params"]]

    def step(self):
        self.inner.step()

def train(model, loader):
    model = model.cuda().bfloat16()  # !
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from transformers import AutoModel, HfArgumentParser, Trainer, TrainingArguments

def main(data):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModel.from_pretrained("x", dtype=torch.bfloat16)
    Trainer(model, args, train_dataset=data).train()
""",
            files={
                "run.sh": "torchrun --nproc_per_node 8 example.py --bf16 True\n",
                "ds.sh": "torchrun --nproc_per_node 8 example.py --bf16 True --deepspeed zero3.json\n",
            },
        ),
        Good(
            """\
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders import AttnProcsLayers
from diffusers.models.attention_processor import LoRAAttnProcessor

def processors(loader):
    unet = UNet2DConditionModel.from_pretrained("x")
    unet.to("cuda", dtype=torch.bfloat16)
    unet.set_attn_processor({name: LoRAAttnProcessor(hidden_size=4) for name in unet.attn_processors})
    optimizer = torch.optim.AdamW(AttnProcsLayers(unet.attn_processors).parameters(), lr=1e-4)
    for x in loader:
        unet(x).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from optimi import AdamW as Kahan
from torchao.optim import AdamW8bit
from transformers import AutoModel, Trainer, TrainingArguments

def mixed(loader):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x.to(torch.bfloat16)).sum()
        loss.backward()
        optimizer.step()

def kahan(loader):
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = Kahan(model.parameters(), 1e-5)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def stochastic(loader):
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = AdamW8bit(model.parameters(), bf16_stochastic_round=True)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def masters(loader):
    model = torch.nn.Linear(8, 8).bfloat16()
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    for x in loader:
        model(x).sum().backward()
        for m, p in zip(masters, model.parameters()):
            m.grad = p.grad.float()
        optimizer.step()

def masters_by_name(loader):
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    named = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(named.values())
    for x in loader:
        model(x).sum().backward()
        for n, p in model.named_parameters():
            named[n].grad = None if p.grad is None else p.grad.float()
        optimizer.step()

def trainers(data, config):
    model = AutoModel.from_pretrained("x", dtype=torch.bfloat16)
    Trainer(model, TrainingArguments("out", optim="adamw_anyprecision"), train_dataset=data).train()
    Trainer(model, TrainingArguments("out", optim=config.optim), train_dataset=data).train()
    Trainer(model, TrainingArguments("out", fsdp="full_shard"), train_dataset=data).train()
    Trainer(model, TrainingArguments("out", deepspeed="zero2.json"), train_dataset=data).train()

def parsed(parser, data):
    args = parser.parse_args_into_dataclasses()
    model = AutoModel.from_pretrained("x", dtype=torch.bfloat16)
    Trainer(model, args, train_dataset=data).train()
"""
        ),
        Good(
            """\
import torch

def main(layers):
    model = torch.nn.ModuleList(layers)
    model.to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        x = torch.randn(8, 8, device="cuda")
        for layer in model:
            x = layer(x)
        x.backward(torch.ones_like(x))  # the memory is of interest, not the result
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModel

def resumed(data):
    base = AutoModel.from_pretrained("x", torch_dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, "adapter", is_trainable=True)
    train(model, data)

def resumed_at_once(data):
    train(AutoPeftModelForCausalLM.from_pretrained("adapter", dtype=torch.bfloat16, is_trainable=True), data)

def train(model, data):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in data:
        model(x).loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def frozen_parts(model, head, loader):
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def rounded(loader, tower):
    tower = tower.to(torch.bfloat16)
    tower.eval()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(tower(x)).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from checkpoints import load_checkpoint, rank

def train(loader):
    model = torch.nn.Linear(8, 8)
    model = model.to(torch.bfloat16)  # !
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    load_checkpoint("last.pt", model, optimizer)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    return rank()
""",
            files=_SHARDED_CHECKPOINTS,
        ),
        Good(
            """\
import torch
from checkpoints import load_checkpoint, shard

def train(loader):
    model = torch.nn.Linear(8, 8)
    model = shard(model.to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    load_checkpoint("last.pt", model, optimizer)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            files=_SHARDED_CHECKPOINTS,
        ),
        Bad(
            """\
import torch

def fit(make, data):
    base = torch.nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    base.weight.requires_grad_(False)
    net = make(base)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    for x in data:
        net(x).sum().backward()
        optimizer.step()

def fit_registers(make, data):
    adapter = make().to(device="cuda", dtype=torch.bfloat16)
    for param in adapter.trainable_parameters():
        param.data = param.data.float()
    optimizer = torch.optim.AdamW(adapter.parameters())
    for x in data:
        adapter(x).sum().backward()
        optimizer.step()

def fit_head(make, data):
    head = torch.nn.Linear(8, 8).to(torch.bfloat16)  # !
    head.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters())
    for x in data:
        head(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from transformers import AutoModelForCausalLM

def build_model(name):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)  # !
    model.gradient_checkpointing_enable()
    return model
""",
            files={
                "pyproject.toml": "",
                "train.py": "import torch\n\nfrom models import build_model\n\n"
                'model = build_model("gpt2").cuda()\n'
                "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
                "for x in loader:\n"
                "    model(input_ids=x, labels=x).loss.backward()\n"
                "    optimizer.step()\n",
            },
            name="models.py",
        ),
        Good(
            """\
import torch
from transformers import AutoModelForCausalLM

def build_model(name):
    return AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
""",
            files={
                "pyproject.toml": "",
                "train.py": "import torch\n\nfrom models import build_model\n\n"
                'model, teacher = torch.nn.Linear(8, 8), build_model("gpt2").cuda()\n'
                "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
                "for x in loader:\n"
                "    with torch.no_grad():\n"
                "        target = teacher(x).logits\n"
                "    (model(x) - target).square().mean().backward()\n"
                "    optimizer.step()\n",
            },
            name="models.py",
        ),
        Good(
            """\
import torch
from transformers import AutoModel, TrainingArguments
from own import Config, train
from peft import LoraConfig

def main(args):
    config = Config(
        model=AutoModel.from_pretrained("base", torch_dtype=torch.bfloat16),
        tr_args=TrainingArguments(learning_rate=2e-4),
        peft_config=LoraConfig(r=32) if args.peft else None,
    )
    train(config)
""",
            files={
                "pyproject.toml": "",
                "own.py": "from transformers import Trainer\n\nclass Config:\n"
                "    def __init__(self, model, tr_args, peft_config):\n"
                "        self.model, self.args, self.peft = model, tr_args, peft_config\n\n"
                "def train(config):\n    Trainer(model=config.model, args=config.args).train()\n",
            },
            name="main.py",
        ),
        Bad(
            """\
import torch
from megatron.energon import WorkerConfig, get_loader, get_train_dataset

def train(path):
    model = torch.nn.Linear(8, 8)
    model.to(torch.bfloat16)  # !
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for x in get_loader(get_train_dataset(path, worker_config=WorkerConfig.default_worker_config())):
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        *(
            example(f"{_LOADS}{casts}{_TRAINS}")
            for example, casts in (
                (Bad, "    unet.to(accelerator.device, dtype=weight_dtype)  # !\n"),
                (Bad, "    for each in (vae, unet):\n        each.to(dtype=weight_dtype)  # !\n"),
                (Bad, "    unet = UNet2DConditionModel.from_pretrained(name, torch_dtype=weight_dtype)  # !\n"),
                (Good, "    vae.to(accelerator.device, dtype=weight_dtype)\n"),
                (
                    Good,
                    "    unet.requires_grad_(False)\n    unet.to(dtype=weight_dtype)\n    unet.add_adapter(config())\n",
                ),
                (Good, "    unet.to(dtype=weight_dtype)\n    cast_training_params([unet], dtype=torch.float32)\n"),
                (
                    Good,
                    "    unet.to(dtype=weight_dtype)\n    for p in unet.parameters():\n"
                    "        if p.requires_grad:\n            p.data = p.to(torch.float32)\n",
                ),
            )
        ),
        Bad(
            """\
import torch
from net import Net

def build(dtype=torch.bfloat16):
    model = Net().to("cuda", dtype)  # !
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)
""",
            files={
                "pyproject.toml": "",
                "train.py": "import torch\nfrom build import build\n\ndef train(loader):\n"
                "    model, optimizer = build(torch.bfloat16)\n    for x in loader:\n"
                '        with torch.autocast("cuda", dtype=torch.bfloat16):\n            loss = model(x).sum()\n'
                "        loss.backward()\n        optimizer.step()\n",
            },
            name="build.py",
        ),
        Good(
            """\
import torch
from net import Net

def build(dtype=torch.bfloat16):
    model = Net().to("cuda", dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)
""",
            files={
                "pyproject.toml": "",
                "train.py": "import torch\nfrom build import build\n\ndef train(loader):\n"
                "    model, optimizer = build(torch.float32)\n    for x in loader:\n"
                '        with torch.autocast("cuda", dtype=torch.bfloat16):\n            loss = model(x).sum()\n'
                "        loss.backward()\n        optimizer.step()\n",
            },
            name="build.py",
        ),
        Good(
            """\
import time
import torch

model = torch.nn.Embedding(8, 8).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
start = time.time()
for i in range(100):
    loss = model(torch.tensor([[1, 2, 3]], dtype=torch.long).cuda()).sum()
    loss.backward()
    optimizer.step()
    print(i, loss.item(), time.time() - start)
"""
        ),
        Good(
            """\
import torch
from transformers import AutoModel

class Prompts(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

def train(loader):
    prompts = Prompts(AutoModel.from_pretrained("base", dtype=torch.bfloat16))
    flow = torch.nn.Linear(prompts.encoder.config.hidden_size, 8)
    optimizer = torch.optim.AdamW(flow.parameters(), lr=1e-5)
    for x in loader:
        flow(x).sum().backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for weights in facts.training_use.weights(Dtype.BF16):
            optimizers = facts.training_use.plain_optimizers(weights.training) or facts.training_use.trainers(
                weights.training
            )
            if optimizers and not (facts.training_use.keeps_masters(weights) or _gets_adapters(weights.event, facts)):
                call = weights.event.call
                expr = facts.short(call.func if weights.event.kind == "load" else call.node)
                yield self.at(
                    weights.event,
                    expr=expr,
                    dtypes="BF16 or FP16" if weights.event.may_be(Dtype.FP16) else "BF16",
                    notes=(Note("trained with here", optimizers[0].span, facts.elsewhere(optimizers[0])),),
                )


def _gets_adapters(event: Event, facts: Facts) -> bool:
    """True if a model is an argument next to `peft_config`, in a call of whatever starts its training."""
    node = facts.parent(event.call.node)
    while node is not None and not isinstance(node, cst.BaseSmallStatement):
        call = facts.call_of(node) if isinstance(node, cst.Call) else None
        if call is not None and "peft_config" in call.keywords:
            return True
        node = facts.parent(node)
    return False
