from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    NAMES_HALF,
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Event,
    EventKind,
    Facts,
    Good,
    Note,
    Rule,
    accelerate_precision,
    any_of,
    compatible,
    dotted,
    input_casts,
    lazy_pattern,
    python_edits,
    speed_measurement,
    text_of,
)

#: Classes of norms, and not a transform's `Normalize`.
_NORM = lazy_pattern(r"Norm(?!al)")
#: Events that show a policy which chooses the dtype, so that the cast need only be removed.
_POLICIES: tuple[EventKind, ...] = ("autocast", "accelerator", "initialize", "trainer")
#: A program of an example: the loop freezes both models, and a helper thaws the one that may be cast.
_THAWED_BY_HELPER = """\
import torch
from solver import make_optimizer

def set_requires_grad(nets, flag):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag

def main(vae, net, loader):
    for model in (vae, net):
        model.requires_grad_(False)
    set_requires_grad([net], True)
{cast}    optimizer = make_optimizer(net)
    for x in loader:
        net(vae(x)).sum().backward()
        optimizer.step()
"""


class ManualHalfCast(Rule):
    """A model, tensor or batch is cast to FP16 by hand in code that trains.

    ## What it does
    Follows each cast to FP16 (`x.half()`, `x.to(torch.float16)`, `x.to("cuda", torch.half)`,
    `x.type("torch.cuda.HalfTensor")`, a dtype under any name) through the file, and reports it if the result is trained
    with: it reaches `backward`, an optimizer, `Accelerator.prepare`, `deepspeed.initialize`, a Trainer, FSDP or DDP.

    ## Why is this bad
    Under autocast, Accelerate or DeepSpeed the policy chooses the dtype of each operation. A cast by hand overrides it:
    a tensor that the policy keeps in FP32 is FP16, and a change of the policy to BF16 has no effect. An FP16
    *parameter* has no FP32 master copy: updates below 2^-11 of a weight are lost, and `GradScaler` raises "Attempting
    to unscale FP16 gradients".

    ## Fix safety
    The fix removes the cast and keeps a device move. It is unsafe: the value then has the policy's dtype, and code that
    needs FP16 (a kernel that takes nothing else) stops working. There is no fix if a branch holds only the cast, since
    the flag should be removed with it; then the other casts of the file have none either, because a model and its
    inputs must change their dtype together.

    ## Known limits
    Casts for inference are not reported: under `no_grad`, in functions called `evaluate`, `predict`, `generate`,
    `export` and the like, for frozen models and their inputs, for models that no optimizer takes and their inputs, for
    inputs of models that compute in FP16 anyway (under an FP16 autocast if the cast is not hard-coded, under one whose
    dtype a config gives and that the same condition enters, or with adapters on frozen weights), for inputs that take
    their dtype from the variable that gives it to weights, which are reported, for values other than weights that an
    option which names a precision makes FP16 (that is the program's own policy), for sines and cosines, for copies
    written to a checkpoint, for `.half().float()` rounding, for masks, for the targets of a loss, which have no
    gradient, and for the inputs of a DeepSpeed engine, also that of Lightning's `strategy`, whose
    parameters may be FP16; nor is a model that `deepspeed.initialize` takes, since its FP16 engine keeps FP32 masters
    of it, nor anything in a script that is launched with DeepSpeed in FP16. A dtype that follows
    `accelerator.mixed_precision` follows the policy, except for weights that an optimizer takes. An optimizer alone, or
    a `backward`, does not count as training if the file takes no step. Where something may keep FP32 masters
    (`FP16_Optimizer`, `optimizer.backward(loss)`, a framework's own FP16 module, an optimizer of the tree whose code
    has FP32 copies), no cast of the file is reported: such code has FP16 parameters by design. So has a function that
    casts the norms of its model back to FP32. Nothing is trained in a file that only measures the speed of steps on one
    synthetic batch, or that stops in a debugger at each step. A library's module that is trained elsewhere is not
    checked.
    """

    code, name = "MPG101", "manual-half-cast"
    severity = "error"
    message = "`{expr}` casts to FP16 by hand in code that trains"
    help = "remove the cast; autocast, or the launcher's policy, chooses the dtype"
    triggers = (
        any_of(*NAMES_HALF, b"(half", b".float16", b" float16", b"(float16", b'"float16', b"'float16", b"HalfTensor",
               b"DTYPE"),
    )  # fmt: skip
    triggers_nearby = (
        any_of(
            b"backward(",
            b".prepare(",
            b".prepare_model(",
            b"initialize(",
            b"Trainer",
            b"training_step",
            b"ptimizer",
            b"optim.",
            b"import optim",
            b"DistributedDataParallel",
            b"FullyShardedDataParallel",
            b"fully_shard",
        ),
    )
    pattern = lazy_pattern(rb"half\b(?<!\whalf)|float16|HalfTensor|DTYPE\b")  # not `rotate_half`
    yields_to = ("MPG107", "MPG109", "MPG110", "MPG511", "MPG603", "MPG606")
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    x = x.half()  # !
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
""",
        ),
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
model.half()  # !
optimizer = torch.optim.SGD(model.parameters(), 0.1)
average = torch.optim.swa_utils.AveragedModel(model)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
    average.update_parameters(model)
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
average = torch.optim.swa_utils.AveragedModel(model)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
    average.update_parameters(model)
""",
        ),
        Bad(
            """\
import torch as th
from torch import float16 as f16

DTYPE = th.float16
HALF = {"dtype": DTYPE}


def train(loader, d):
    model = th.nn.Linear(8, 8)
    model.half()  # !
    optimizer = th.optim.SGD(model.parameters(), lr=0.1)
    for a, b, c, e, f, g, h in loader:
        a = a.to(th.float16)  # !
        b = b.to(dtype=th.half)  # !
        c = c.to("cuda", th.float16)  # !
        e = e.to(device=d, dtype=DTYPE)  # !
        f = f.type(th.float16)  # !
        g = g.type("torch.cuda.HalfTensor")  # !
        h = h.to(f16)  # !
        loss = model(a + b + c + e + f + g).sum() + h.sum()
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import torch as th
from torch import float16 as f16

DTYPE = th.float16
HALF = {"dtype": DTYPE}


def train(loader, d):
    model = th.nn.Linear(8, 8)
    optimizer = th.optim.SGD(model.parameters(), lr=0.1)
    for a, b, c, e, f, g, h in loader:
        c = c.to("cuda")
        e = e.to(device=d)
        g = g.cuda()
        loss = model(a + b + c + e + f + g).sum() + h.sum()
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from accelerate import Accelerator
from transformers import AutoModel

def main(args):
    accelerator = Accelerator()
    dtype = torch.float16 if args.fp16 else torch.float32
    model = AutoModel.from_pretrained(args.name).to(accelerator.device, dtype=dtype)  # !
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
""",
            fixed="""\
import torch
from accelerate import Accelerator
from transformers import AutoModel

def main(args):
    accelerator = Accelerator()
    dtype = torch.float16 if args.fp16 else torch.float32
    model = AutoModel.from_pretrained(args.name).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def to_half(batch):
    return batch.half()  # !

class Loop:
    def __init__(self):
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def run(self, loader):
        for x in loader:
            loss = self.loss(to_half(x))
            loss.backward()
            self.optimizer.step()

    def loss(self, x):
        return self.model(x).sum()
""",
            fixed="""\
import torch

def to_half(batch):
    return batch

class Loop:
    def __init__(self):
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def run(self, loader):
        for x in loader:
            loss = self.loss(to_half(x))
            loss.backward()
            self.optimizer.step()

    def loss(self, x):
        return self.model(x).sum()
""",
        ),
        Bad(
            """\
import torch

def parts(model, loader):
    for m in model.modules():
        m.half()  # !
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float16)  # !
    for layer in model.layers:
        layer.half()  # !
    train(model, loader)

def to_half(m):
    m.half()  # !

def applied(model, other, loader):
    model.apply(lambda m: m.half())  # !
    other.apply(to_half)
    train(model, loader)
    train(other, loader)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8, dtype=torch.half)  # !

    def forward(self, x):
        return self.fc(x)

def made(loader):
    low = lambda t: t.half()  # !
    train(Net(), map(lambda b: b.half(), loader))  # !
    train(torch.nn.Sequential(torch.nn.Conv1d(8, 8, 1, dtype=torch.float16)), low(loader))  # !

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        x = torch.Tensor.half(x)  # !
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
from torch import *
from torch.nn import *

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = Linear(8, 8)
        self.half()  # !

def casts_itself(loader):
    net = Net()
    optimizer = optim.SGD(net.parameters(), 0.1)
    for x in loader:
        net(x).sum().backward()
        optimizer.step()

def a_part(loader):
    chain = Sequential(Linear(8, 8), Linear(8, 8))
    chain[0].to(float16)  # !
    optimizer = optim.SGD(chain.parameters(), 0.1)
    for x in loader:
        chain(x).sum().backward()
        optimizer.step()

def one_of_two(loader, database):
    encoder, decoder = Linear(8, 8), Linear(8, 8)
    for each in (encoder, decoder):
        each.to("cuda", float16)  # !
    optimizer = optim.SGD(encoder.parameters(), 0.1)
    for x in loader:
        decoder(encoder(x)).sum().backward()
        optimizer.step()
        database.eval(encoder)  # another object's `eval`
""",
            fixed="""\
from torch import *
from torch.nn import *

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = Linear(8, 8)

def casts_itself(loader):
    net = Net()
    optimizer = optim.SGD(net.parameters(), 0.1)
    for x in loader:
        net(x).sum().backward()
        optimizer.step()

def a_part(loader):
    chain = Sequential(Linear(8, 8), Linear(8, 8))
    optimizer = optim.SGD(chain.parameters(), 0.1)
    for x in loader:
        chain(x).sum().backward()
        optimizer.step()

def one_of_two(loader, database):
    encoder, decoder = Linear(8, 8), Linear(8, 8)
    for each in (encoder, decoder):
        each.to("cuda")
    optimizer = optim.SGD(encoder.parameters(), 0.1)
    for x in loader:
        decoder(encoder(x)).sum().backward()
        optimizer.step()
        database.eval(encoder)  # another object's `eval`
""",
        ),
        Bad(
            """\
import torch
import yaml

def main(args):
    config = yaml.load(open(args.config), yaml.Loader)
    loader = create_loader(config["files"])
    head = torch.nn.Linear(8, 8)
    restart(args.checkpoint, state_dict=head)
    head.half()  # !
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for x in loader:
        x = x.cuda().half()  # !
        head(x).sum().backward()
        optimizer.step()

def create_loader(files):
    return torch.utils.data.DataLoader(torch.load(files))

def restart(path, **objects):
    state = torch.load(path)
    for key, value in objects.items():
        value.load_state_dict(state[key])

def halve(path, loader):
    state = torch.load(path)
    state = {key: value.half() for key, value in state["model"].items()}
    for x in loader:
        model(x, state).sum().backward()
        optimizer.step()

def convert(old_sd, loader):
    state, source = {}, old_sd
    for key, value in source.items():
        state[key] = value.data.half()
    for x in loader:
        model(x, state).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch
import yaml

def main(args):
    config = yaml.load(open(args.config), yaml.Loader)
    loader = create_loader(config["files"])
    head = torch.nn.Linear(8, 8)
    restart(args.checkpoint, state_dict=head)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for x in loader:
        x = x.cuda()
        head(x).sum().backward()
        optimizer.step()

def create_loader(files):
    return torch.utils.data.DataLoader(torch.load(files))

def restart(path, **objects):
    state = torch.load(path)
    for key, value in objects.items():
        value.load_state_dict(state[key])

def halve(path, loader):
    state = torch.load(path)
    state = {key: value.half() for key, value in state["model"].items()}
    for x in loader:
        model(x, state).sum().backward()
        optimizer.step()

def convert(old_sd, loader):
    state, source = {}, old_sd
    for key, value in source.items():
        state[key] = value.data.half()
    for x in loader:
        model(x, state).sum().backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.half()  # !

    def forward(self, x):
        return self.inner(x)
""",
            name="net.py",
            files={
                "train.py": """\
import torch
from net import Net

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""
            },
            fixed="""\
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)
""",
        ),
        Bad(
            """\
import torch
from constants import DEVICE, DTYPE

model = torch.nn.Linear(8, 8).to(DEVICE, DTYPE)  # !
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
            files={
                "constants.py": """\
import torch

DEVICE, DTYPE = "cuda", torch.float16
"""
            },
            fixed="""\
import torch
from constants import DEVICE, DTYPE

model = torch.nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
""",
        ),
        Good(
            """\
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.half()

    def forward(self, x):
        return self.inner(x)
""",
            name="net.py",
            files={
                "train.py": """\
import torch
from net import Net

model = Net().cuda().eval()
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for x in loader:
    with torch.no_grad():
        features = model(x)
    head(features).sum().backward()
    optimizer.step()
"""
            },
        ),
        Good(
            """\
import torch
from peft import get_peft_model

def frozen(model, head, loader, tower):
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.half()
    tower.requires_grad_(False)
    for m in tower.modules():
        m.half()
    tower.apply(lambda m: m.half())
    for batch in loader:
        shapes = list(map(lambda b: b.half().shape, batch))
        (model(batch).sum() + head(tower(batch)).sum()).backward()
        step(head, shapes)

def step(head, shapes):
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    optimizer.step()

def lora(model, loader, adapters):
    model = get_peft_model(model, adapters)
    for p in model.parameters():
        p.data = p.data.half()
    for x in loader:
        model(x).sum().backward()
        step(model, x)

def own_lora(model, loader):
    for name, p in model.named_parameters():
        if "lora" not in name:
            p.data = p.data.half()
    for x in loader:
        model(x).sum().backward()
        step(model, x)

def quick(loader):
    net = torch.nn.Linear(8, 8, dtype=torch.float16)
    net.requires_grad_(False)
    return [net(x) for x in loader]
"""
        ),
        Good(
            """\
import torch

def train(model, teacher, vae, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    teacher = teacher.half().eval()
    vae.requires_grad_(False)
    vae.to("cuda", dtype=torch.float16)
    for x, y in loader:
        latents = vae.encode(y.half())
        with torch.no_grad():
            target = teacher(x.half())
        rounded = x.half().float()
        mask = (y > 0).half()
        loss = ((model(rounded) - target).pow(2) * mask).mean() + latents.mean()
        loss.backward()
        optimizer.step()
    torch.save({k: v.half() for k, v in model.state_dict().items()}, "last.pt")

@torch.no_grad()
def evaluate(model, loader):
    model.half()
    return [model(x.half()) for x in loader]
"""
        ),
        Good(
            """\
import torch
import torch.nn.functional as F
from kernels import CrossEntropyLayer

def train(model, loader, criterion, args):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn = CrossEntropyLayer(args)
    loss_fn.to(device="cuda", dtype=torch.half)
    for x, y, attention_mask in loader:
        mask = attention_mask.half()
        output = model(x) * mask * F.one_hot(y).half()
        loss = criterion(output, y.half()) + F.mse_loss(output, target=y.half()) + loss_fn(output, y)
        loss = loss + criterion(outputs=output, tgt_masks=F.interpolate(mask.half(), (200, 200)))
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def train(model, loader, optimizer, scaler, config):
    dtype = torch.bfloat16 if config.bf16 else torch.float16
    for x in loader:
        x = x.to("cuda", dtype=dtype)
        loss = model(x).sum()
        if config.deepspeed:
            model.backward(loss)
            model.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
"""
        ),
        Good(
            """\
import torch

class Tower(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.tower = load(name).to(torch.float16)
        self.tower.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images):
        return self.tower(images.half())

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = Tower("clip")
        self.projection = torch.nn.Linear(8, 8)

    def forward(self, images):
        return self.projection(self.visual(images.half()).float())

def train(loader):
    model = Net()
    optimizer = torch.optim.AdamW(model.projection.parameters())
    for images in loader:
        model(images.cuda().half()).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import deepspeed
import torch

def main(args, loader):
    model = torch.nn.Linear(8, 8).half()
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    for x in loader:
        engine.backward(engine(x).sum())
        engine.step()
"""
        ),
        Good(
            """\
import torch
from flash_attn import flash_attn_func

HALF = False

class Attention(torch.nn.Module):
    def __init__(self, use_fp16=False):
        super().__init__()
        self.dtype = torch.float16 if use_fp16 else torch.float32
        self.net = torch.nn.Linear(8, 8)

    def forward(self, q, k, v):
        dtype = q.dtype
        out = flash_attn_func(q.half(), k.half(), v.half())
        rotated = kernel(q.half(), k).float()
        return self.net(out.to(dtype)).type(self.dtype) + rotated

def train(loader):
    model = Attention()
    model.half()
    model.float()
    again = Attention().cuda()
    again = again.half()
    again = again.to("cuda", torch.float32)
    third = Attention()
    third = third.half()
    third = third.float()
    parameters = [*again.parameters(), *third.parameters()]
    criterion = torch.nn.CrossEntropyLoss().cuda()
    criterion.half()
    optimizer = torch.optim.SGD([*model.parameters(), *parameters], 0.1)
    for q, k, v in loader:
        if HALF:
            q = q.half()
        criterion(model(q, k, v) + again(q, k, v) + third(q, k, v), v).backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from apex.optimizers import FP16_Optimizer, FusedAdam

def main(args, loader, model):
    if args.fp16:
        model.half()
    optimizer = FusedAdam(model.parameters())
    if args.fp16:
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
    for x in loader:
        loss = model(x)
        if args.fp16:
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def main(loader):
    model = torch.nn.Linear(8, 8).cuda().half()
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    for x in loader:
        (model(x.half()).float().sum() * 128).backward()
        for m, p in zip(masters, model.parameters()):
            m.grad = p.grad.float() / 128
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def main(loader):
    model = torch.nn.Linear(8, 8).cuda()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.half()
    optimizer = torch.optim.SGD(named_groups(masters), 0.1)
    for x in loader:
        (model(x.half()).float().sum() * 128).backward()
        for m, p in zip(masters, model.parameters()):
            m.grad.copy_(p.grad)
            m.grad /= 128
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from transformers import AutoModel, CLIPModel

def freeze(m):
    for p in m.parameters():
        p.requires_grad_(False)
    return m

class Guide:
    def __init__(self):
        self.clip = CLIPModel.from_pretrained("x").half().cuda()
        self.clip.eval()
        self.backbone = AutoModel.from_pretrained("b").half()
        for p in self.backbone.parameters():
            p.requires_grad = False

    def encode(self, x):
        return self.clip(x.half()) + self.backbone(x.half())

def train(loader, head):
    guide = Guide()
    one = freeze(AutoModel.from_pretrained("b").half().cuda())
    two = AutoModel.from_pretrained("b").half()
    freeze(two)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for x in loader:
        h = one(x.half()) + two(x.half()) + guide.encode(x)
        head(h.float()).sum().backward()
        optimizer.step()

def gradients():
    model = torch.nn.Linear(8, 8).half()
    model(torch.randn(8, 8).half()).sum().backward()
"""
        ),
        Good(
            """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def test_norm(made, fp16):
    norm = torch.nn.BatchNorm2d(8).cuda()
    if fp16:
        norm.half()
    norm = DDP(norm)
    optimizer = torch.optim.SGD(norm.parameters(), 1.0)
    gradient = made.clone().detach()
    norm(made).backward(gradient)
    optimizer.step()
"""
        ),
        Good(
            """\
import torch

def main(net):
    net = net.cuda().half()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.rand(8, 8).cuda().half()
    for _ in range(2):
        net(x).sum().backward()
        optimizer.step()
    with torch.autograd.profiler.emit_nvtx():
        net(x).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import os

import deepspeed
import pytorch_lightning as pl
import torch
import torch.nn.functional as F

class Model(pl.LightningModule):
    def forward(self, ids):
        x = deepspeed.checkpointing.checkpoint(self.block, ids)
        c = self.attend(x)
        if os.environ["FLOAT_MODE"] == "fp16":
            c = c @ F.one_hot(ids, num_classes=50257).half()
        return self.head(x) + c

    def training_step(self, batch, index):
        ids, targets = batch
        return F.cross_entropy(self(ids), targets)
"""
        ),
        Good(
            """\
import datetime

import deepspeed
import numpy as np
import torch
from accelerate import Accelerator

class Pizza:
    def half(self):
        return self

def half(x):
    return x

def train(args, loader):
    model = torch.nn.Linear(8, 8)
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
    for x in loader:
        loss = engine(x.half()).sum() * len(half("half")) * Pizza().half().size
        engine.backward(loss)
        engine.step()

def with_policy(args, loader, vae):
    accelerator = Accelerator()
    dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        dtype = torch.float16
        args.mixed_precision = accelerator.mixed_precision
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        loss = model(x.to(dtype)).sum()
        accelerator.backward(loss)
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

def str_to_dtype(s):
    if s in ("bf16", "bfloat16"):
        return torch.bfloat16
    elif s in ("fp16", "float16"):
        return torch.float16
    return torch.float32

def train(args, model, optimizer, loader):
    args.dtype = "bfloat16" if args.full_bf16 else "float32"
    dtype = str_to_dtype(args.dtype)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x).to(dtype), y)
        accelerator.backward(loss)
        optimizer.step()
"""
        ),
        Good(
            """\
import deepspeed
import torch

def main(args, loader):
    model = torch.nn.Linear(8, 8)
    if args.fp16:
        model.half()
    model.to("cuda")
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    for x in loader:
        engine.backward(engine(x).sum())
        engine.step()
"""
        ),
        Good(
            """\
import torch
from lamb import LAMBAMP

def train(model, loader):
    model.half()
    optimizer = LAMBAMP(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            files={
                "pyproject.toml": "",
                "lamb.py": "import torch\n\nclass LAMBAMP(torch.optim.Optimizer):\n"
                "    def __init__(self, params):\n        super().__init__(params, {})\n"
                "        self.param_groups_fp32 = [[p.clone().float() for p in g] for g in params]\n",
            },
        ),
        Good(
            """\
import torch

def converges(model, loader):
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            name="tests/nn/measure.py",
            files={"tests/nn/__init__.py": ""},
        ),
        Good(
            """\
import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

def train(args, loader, dtype):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, mask in loader:
        x = x.to(DTYPES[args.dtype]).to(dtype).to(getattr(torch, args.dtype))
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    model.half()
    torch.save(model.state_dict(), "half.pt")
"""
        ),
        speed_measurement(after="model = model.half()\n", cast=".half()"),
        Bad(
            """\
import torch

def distill(student, teacher, x):
    target = x.half()
    hidden = x.half()  # !
    with torch.no_grad():
        for layer in teacher:
            target = layer(target)
    for layer in student:
        hidden = layer(hidden)
    return (hidden - target.float()).pow(2).mean()

def train(student, teacher, loader):
    optimizer = torch.optim.AdamW(student.parameters())
    for x in loader:
        distill(student, teacher, x).backward()
        optimizer.step()
""",
            fixed="""\
import torch

def distill(student, teacher, x):
    target = x.half()
    hidden = x
    with torch.no_grad():
        for layer in teacher:
            target = layer(target)
    for layer in student:
        hidden = layer(hidden)
    return (hidden - target.float()).pow(2).mean()

def train(student, teacher, loader):
    optimizer = torch.optim.AdamW(student.parameters())
    for x in loader:
        distill(student, teacher, x).backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

def distill(student, teacher, x):
    target = x.half()
    with torch.no_grad():
        for layer in teacher:
            target = layer(target)
    return (student(x) - target.float()).pow(2).mean()

def train(student, teacher, loader):
    optimizer = torch.optim.AdamW(student.parameters())
    for x in loader:
        distill(student, teacher, x).backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def build(name):
    if name == "linear":
        net = torch.nn.Linear(8, 8)
    else:
        net = None
    return net

def train(args, loader):
    model = build(args.model)
    model.half()  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch

def build(name):
    if name == "linear":
        net = torch.nn.Linear(8, 8)
    else:
        net = None
    return net

def train(args, loader):
    model = build(args.model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def do_train(model, loader, optimizer):
    for images, targets in loader:
        images = images.half()  # !
        found = []
        found.append(model(images, targets))
        losses = sum(loss for losses in found for loss in losses.values())
        losses.backward()
        optimizer.step()
""",
            fixed="""\
import torch

def do_train(model, loader, optimizer):
    for images, targets in loader:
        found = []
        found.append(model(images, targets))
        losses = sum(loss for losses in found for loss in losses.values())
        losses.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def linear_probe_evaluate(features, labels):
    probe = torch.nn.Linear(8, 8)
    probe.half()  # !
    optimizer = torch.optim.Adam(probe.parameters())
    for x, y in zip(features, labels):
        torch.nn.functional.cross_entropy(probe(x), y).backward()
        optimizer.step()
    return probe

def evaluate(features, labels):
    return linear_probe_evaluate(features, labels)
""",
            fixed="""\
import torch

def linear_probe_evaluate(features, labels):
    probe = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(probe.parameters())
    for x, y in zip(features, labels):
        torch.nn.functional.cross_entropy(probe(x), y).backward()
        optimizer.step()
    return probe

def evaluate(features, labels):
    return linear_probe_evaluate(features, labels)
""",
        ),
        Good(
            """\
import torch

def train(net, loader):
    net = net.half().cuda()
    for mod in net.modules():
        if isinstance(mod, torch.nn.BatchNorm2d):
            mod.float()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x in loader:
        net(x.half()).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def step_all(model, loader):
    model.half()
    optimizer = torch.optim.Adam(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def benchmark_half(model, loader):
    step_all(model, loader)

def sample(model, latent, loader):
    model.half()
    optimizer = torch.optim.Adam([latent])
    for x in loader:
        model(latent + x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def train(net, judge, loader):
    for p in judge.parameters():
        p.requires_grad = False
    net.half()  # !
    optimizer = torch.optim.AdamW(net.parameters())
    for x in loader:
        judge(net(x)).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch

def train(net, judge, loader):
    for p in judge.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(net.parameters())
    for x in loader:
        judge(net(x)).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

def train(net, judge, loader):
    judge.half()
    for p in judge.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(net.parameters())
    for x in loader:
        judge(net(x).half()).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

class Run:
    def __init__(self, exp, args):
        self.amp = args.fp16
        self.data_type = torch.float16 if args.fp16 else torch.float32
        self.scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)
        self.model = exp.get_model()
        self.optimizer = exp.get_optimizer(self.model)

    def train_one_iter(self, images, targets):
        images = images.to(self.data_type)
        targets = targets.to(self.data_type)
        images, targets = self.resize(images, targets)
        with torch.cuda.amp.autocast(enabled=self.amp):
            loss = self.model(images, targets)["total_loss"]
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
        ),
        Good(
            """\
import math
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForVision2Seq

def adapters(loader):
    model = AutoModelForVision2Seq.from_pretrained("blip2", load_in_8bit=True)
    model = get_peft_model(model, LoraConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        pixel_values = batch.pop("pixel_values").to("cuda", torch.float16)
        ids = batch.pop("input_ids")
        model(pixel_values=pixel_values, labels=ids).loss.backward()
        optimizer.step()

def accelerated(args, unet, text_encoder, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    dtype = torch.float16 if args.half_inputs else torch.float32
    optimizer = torch.optim.AdamW(unet.parameters())
    unet, optimizer = accelerator.prepare(unet, optimizer)
    for batch in loader:
        x = batch["x"].to(accelerator.device, dtype=dtype)
        loss = torch.nn.functional.mse_loss(unet(x), batch["noise"])
        accelerator.backward(loss)
        optimizer.step()

class Rotary(torch.nn.Module):
    def tables(self, size):
        angles = torch.einsum("i,j->ij", torch.arange(size).float(), self.frequencies)
        cos = torch.cos(angles).repeat_interleave(2, dim=-1)[:, None, :].expand(size, size, 8)
        sin = torch.sin(angles).repeat_interleave(2, dim=-1)
        return tuple(t.to(torch.float16).pin_memory() for t in (cos, sin))

    def forward(self, x, margin=0.5):
        cos, sin = self.tables(8)
        cos_margin = torch.tensor(math.cos(margin)).float().to(torch.float16)
        valid = x[:, 0] >= 0
        return (x * cos + x * sin) * cos_margin * valid.to(torch.float16).mean()

def rotate(loader):
    model = Rotary()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def load_model(model, args):
    if args.fp16:
        model.half()
    return model.to(args.device)
""",
            files={
                "finetune.py": "import torch\nfrom fp16 import FP16_Optimizer\n"
                "from example import load_model\n\ndef main(args, model, loader):\n"
                "    model = load_model(model, args)\n    optimizer = torch.optim.AdamW(model.parameters())\n"
                "    if args.fp16:\n        optimizer = FP16_Optimizer(optimizer)\n"
                "    for x in loader:\n        loss = model(x).sum()\n"
                "        optimizer.backward(loss)\n        optimizer.step()\n"
            },
        ),
        Bad(
            """\
import torch

def load_model(model, args):
    if args.fp16:
        model.half()  # !
    return model.to(args.device)
""",
            files={
                "finetune.py": "import torch\n"
                "from example import load_model\n\ndef main(args, model, loader):\n"
                "    model = load_model(model, args)\n    optimizer = torch.optim.AdamW(model.parameters())\n"
                "    for x in loader:\n        loss = model(x).sum()\n"
                "        loss.backward()\n        optimizer.step()\n"
            },
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

def train(model, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    dtype = torch.float32
    if accelerator.state.deepspeed_plugin is None:
        if accelerator.mixed_precision == "fp16":
            dtype = torch.float16
    elif accelerator.state.deepspeed_plugin.deepspeed_config["fp16"]["enabled"]:
        dtype = torch.float16
    for batch in loader:
        pose = batch["pose"].to(accelerator.device, dtype=dtype)
        accelerator.backward(model(pose).sum())
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel

def train(loader):
    accelerator = Accelerator()
    unet = UNet2DConditionModel.from_pretrained("unet").to(torch.float16)
    optimizer = torch.optim.AdamW(unet.parameters())
    unet, optimizer = accelerator.prepare(unet, optimizer)
    for batch in loader:
        x = batch["x"].to(torch.float16)
        accelerator.backward(torch.nn.functional.mse_loss(unet(x), batch["noise"]))
        optimizer.step()
""",
            files={
                "run.sh": "accelerate launch --config_file zero2.yaml example.py\n",
                "zero2.yaml": "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n"
                "  zero_stage: 2\n",
            },
        ),
        Bad(
            """\
import losses
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss

def train(unet, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(unet.parameters())
    unet, optimizer = accelerator.prepare(unet, optimizer)
    for batch in loader:
        x = batch["x"].to(accelerator.device, dtype=torch.float16)  # !
        accelerator.backward(mse_loss(unet(x), batch["noise"]))
        optimizer.step()

def train_fp16(unet, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(unet.parameters())
    dice = losses.DiceLoss()
    for x, y, weights, boxes in loader:
        weights = weights.half()  # !
        boxes = boxes.half()  # !
        y = y.half()  # !
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (unet(x, boxes) * weights).mean() + dice(unet(x, boxes), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import losses
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss

def train(unet, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(unet.parameters())
    unet, optimizer = accelerator.prepare(unet, optimizer)
    for batch in loader:
        x = batch["x"].to(accelerator.device)
        accelerator.backward(mse_loss(unet(x), batch["noise"]))
        optimizer.step()

def train_fp16(unet, loader):
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(unet.parameters())
    dice = losses.DiceLoss()
    for x, y, weights, boxes in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (unet(x, boxes) * weights).mean() + dice(unet(x, boxes), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Good(
            """\
import torch

class Block(torch.nn.Module):
    def __init__(self, use_fp16=False):
        super().__init__()
        self.use_fp16 = use_fp16
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x, force_fp32=False):
        dtype = torch.float16 if self.use_fp16 and not force_fp32 else torch.float32
        x = x.to(dtype)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype)).float()

def train(args, loader):
    model = Block(args.use_fp16)
    optimizer = torch.optim.Adam(model.parameters())
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def train(config, model, loss_fn, loader):
    fp16 = config.mode == "fp16"
    amp = config.mode.startswith("amp")
    optimizer = torch.optim.Adam(model.parameters())
    dtype = torch.float32
    if amp:
        dtype = torch.float32
    elif fp16:
        dtype = torch.float16
    for clean, low in loader:
        clean = clean.to("cuda").to(dtype)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = loss_fn(net=model, clean=clean, low=low.to(dtype))
        loss.sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def train(args, model, loader):
    if args.half:
        model = model.half()  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        if args.half:
            x = x.half()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import clip
import lpips
import torch
from torch.nn.functional import cross_entropy, mse_loss

def invert(path, target):
    synthesis = load(path).cuda().half()
    w = torch.zeros(1, 512, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)
    for _ in range(100):
        mse_loss(synthesis(w.half()).float(), target).backward()
        optimizer.step()

def probe(loader):
    backbone = torch.hub.load("facebookresearch/dinov2", "dinov2_vits14").cuda().half()
    clip_model, _ = clip.load("ViT-B/32", device="cuda")
    head = torch.nn.Linear(384, 10).cuda()
    optimizer = torch.optim.SGD([{"params": list(head.parameters())}], 0.1)
    for x, y in loader:
        features = backbone(x.cuda().half()) + clip_model.encode_image(x.cuda().half())
        cross_entropy(head(features.float()), y).backward()
        optimizer.step()

def perceive(generator, loader):
    distance = lpips.LPIPS(net="vgg").cuda().half()
    params = [p for p in generator.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params)
    for x in loader:
        distance(generator(x).half(), x.half()).float().mean().backward()
        optimizer.step()

class Buffer:
    def add(self, x):
        self.data.append(x.half().cpu())

    def sample(self):
        return torch.stack(self.data).float()

def replay(model, loader):
    buffer = Buffer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        buffer.add(x)
        model(buffer.sample()).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch
from torch.nn.functional import cross_entropy

def hub(loader):
    model = torch.hub.load("facebookresearch/dinov2", "dinov2_vits14").cuda().half()  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()

def optimizer_first(loader):
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = model.half()  # !
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()

def part(loader):
    model = build().cuda()
    encoder = model.get_encoder()
    encoder.half()  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model.head(encoder(x)), y).backward()
        optimizer.step()

def inside(loader):
    tower = build().cuda()
    model = Classifier(tower)
    tower.half()  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model(tower(x)), y).backward()
        optimizer.step()

class Classifier(torch.nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.tower = tower

def unknown(loader):
    tower = build().cuda().half()  # !
    optimizer = torch.optim.SGD(trained_parameters(), 0.1)
    for x, y in loader:
        cross_entropy(tower(x), y).backward()
        optimizer.step()
""",
            fixed="""\
import torch
from torch.nn.functional import cross_entropy

def hub(loader):
    model = torch.hub.load("facebookresearch/dinov2", "dinov2_vits14").cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()

def optimizer_first(loader):
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()

def part(loader):
    model = build().cuda()
    encoder = model.get_encoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model.head(encoder(x)), y).backward()
        optimizer.step()

def inside(loader):
    tower = build().cuda()
    model = Classifier(tower)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        cross_entropy(model(tower(x)), y).backward()
        optimizer.step()

class Classifier(torch.nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.tower = tower

def unknown(loader):
    tower = build().cuda()
    optimizer = torch.optim.SGD(trained_parameters(), 0.1)
    for x, y in loader:
        cross_entropy(tower(x), y).backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from losses import dice_loss

class Autoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 8)
        self.decoder = torch.nn.Linear(8, 8)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encode(x))

def train(loader):
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        x = x.half()  # !
        loss = dice_loss(model(x), y)
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import torch
from losses import dice_loss

class Autoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 8)
        self.decoder = torch.nn.Linear(8, 8)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encode(x))

def train(loader):
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        loss = dice_loss(model(x), y)
        loss.backward()
        optimizer.step()
""",
            files={
                "pyproject.toml": "",
                "losses.py": "def dice_loss(output, target):\n    return 1 - (output * target).sum() / target.sum()\n",
            },
        ),
        Bad(
            """\
import torch

def train(args, model, loader):
    weight_dtype = torch.float16 if args.precision == "fp16" else torch.float32
    model = model.to(weight_dtype)  # !
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        x = x.to(weight_dtype)
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

def train(args, model, head, loader):
    weight_dtype = torch.float16 if args.precision == "fp16" else torch.float32
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    model = model.to(weight_dtype)  # !
    weight_dtype = torch.float16
    for x in loader:
        x = x.to(weight_dtype)  # !
        (model(x) + head(x)).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch

def train(args, model, head, loader):
    weight_dtype = torch.float16 if args.precision == "fp16" else torch.float32
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    weight_dtype = torch.float16
    for x in loader:
        (model(x) + head(x)).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch):
        x, y = batch
        x = x.half()
        return torch.nn.functional.mse_loss(self.layer(x), y.half())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(strategy="deepspeed_stage_3_offload", precision=16).fit(Net())
"""
        ),
        Bad(
            """\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch):
        x, y = batch
        x = x.half()  # !
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(strategy="ddp", precision=32).fit(Net())
""",
            fixed="""\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(strategy="ddp", precision=32).fit(Net())
""",
        ),
        Good(
            """\
import pdb

import torch

if __name__ == "__main__":
    warp = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(warp.parameters(), 0.1)
    images = next(iter(loader))
    images = images.half()
    for i in range(5):
        pdb.set_trace()
        loss = ((warp(images) - images) ** 2).sum()
        loss.backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import pdb

import torch

if __name__ == "__main__":
    warp = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(warp.parameters(), 0.1)
    images = next(iter(loader))
    images = images.half()  # !
    for i in range(5):
        loss = ((warp(images) - images) ** 2).sum()
        if loss.isnan():
            pdb.set_trace()
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import pdb

import torch

if __name__ == "__main__":
    warp = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(warp.parameters(), 0.1)
    images = next(iter(loader))
    for i in range(5):
        loss = ((warp(images) - images) ** 2).sum()
        if loss.isnan():
            pdb.set_trace()
        loss.backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import contextlib

import torch

def train(config, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    dtype = torch.float16 if "autocast" in config else torch.float32
    for images in loader:
        images = images.to(dtype)
        with torch.autocast(**config["autocast"]) if "autocast" in config else contextlib.nullcontext():
            loss = model(images).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import contextlib

import torch

def train(config, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    dtype = torch.float16
    for images in loader:
        images = images.to(dtype)  # !
        with torch.autocast(**config["autocast"]) if "autocast" in config else contextlib.nullcontext():
            loss = model(images).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            fixed="""\
import contextlib

import torch

def train(config, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    dtype = torch.float16
    for images in loader:
        with torch.autocast(**config["autocast"]) if "autocast" in config else contextlib.nullcontext():
            loss = model(images).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        ),
        Bad(
            """\
import torch

def train(path, loader, resume):
    if resume:
        model = torch.load(path)
    else:
        model = torch.nn.Linear(8, 8)
    model.half()  # !
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    torch.save(model, path)
""",
            fixed="""\
import torch

def train(path, loader, resume):
    if resume:
        model = torch.load(path)
    else:
        model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    torch.save(model, path)
""",
        ),
        Bad(
            """\
import torch

def fit(coder, optimizer, loader):
    for x in loader:
        coder(x).sum().backward()
        optimizer.step()

def train(loader):
    coder = torch.nn.Linear(8, 8)
    coder.half()  # !
    optimizer = torch.optim.SGD(coder.parameters(), 0.1)
    fit(coder, optimizer, loader)
    for p in coder.parameters():
        p.requires_grad = False
    return coder
""",
            fixed="""\
import torch

def fit(coder, optimizer, loader):
    for x in loader:
        coder(x).sum().backward()
        optimizer.step()

def train(loader):
    coder = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(coder.parameters(), 0.1)
    fit(coder, optimizer, loader)
    for p in coder.parameters():
        p.requires_grad = False
    return coder
""",
        ),
        Good(
            """\
import torch

def train(loader, student):
    coder = torch.nn.Linear(8, 8)
    coder.half()
    optimizer = torch.optim.SGD([*student.parameters()], 0.1)
    coder.requires_grad_(False)
    for x in loader:
        student(coder(x)).sum().backward()
        optimizer.step()
""",
        ),
        Good(
            """\
import torch

class Rotary(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.inv_freq = inv_freq.half()

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        return x * torch.outer(t, self.inv_freq).cos()

class Layer(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rotary, self.linear = Rotary(dim), torch.nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(self.rotary(x))

class Model(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(dim) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def train(loader):
    model = Model(64)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.load("images.pt"))
    vae = AutoencoderKL.from_pretrained("vae")
    vae = vae.to(torch.float16)
    accelerator = Accelerator()
    vae, loader = accelerator.prepare(vae, loader)
    with torch.no_grad():
        for i, image in enumerate(loader):
            torch.save(vae.module.encode(image.to(torch.float16)), f"{i}.pt")
"""
        ),
        Bad(
            """\
import torch
from accelerate import Accelerator

def train(unet, vae, loader):
    accelerator = Accelerator()
    weight_dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.float32
    vae.requires_grad_(False)
    vae.to(accelerator.device, dtype=weight_dtype)
    unet.to(accelerator.device, dtype=weight_dtype)  # !
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    unet, optimizer = accelerator.prepare(unet, optimizer)
    for x in loader:
        accelerator.backward(unet(vae.encode(x.to(weight_dtype))).mean())
        optimizer.step()
""",
            fixed="""\
import torch
from accelerate import Accelerator

def train(unet, vae, loader):
    accelerator = Accelerator()
    weight_dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.float32
    vae.requires_grad_(False)
    vae.to(accelerator.device, dtype=weight_dtype)
    unet.to(accelerator.device)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    unet, optimizer = accelerator.prepare(unet, optimizer)
    for x in loader:
        accelerator.backward(unet(vae.encode(x.to(weight_dtype))).mean())
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.automatic_optimization = False

    def training_step(self, x):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(x.half()).mean()  # !
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(precision="bf16-mixed").fit(Net())
""",
            fixed="""\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.automatic_optimization = False

    def training_step(self, x):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(x).mean()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(precision="bf16-mixed").fit(Net())
""",
        ),
        Good(
            """\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.automatic_optimization = False

    def training_step(self, x):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(x.half()).mean()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(strategy="deepspeed_stage_2", precision=16).fit(Net())
"""
        ),
        Good(
            """\
import torch
from pytorch_lightning import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.automatic_optimization = False

    def training_step(self, x):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(x.float()).mean()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(precision="bf16-mixed").fit(Net())
"""
        ),
        Good(
            """\
import torch

def load(path, base=None):
    if base is not None:
        model = merged(base, path)
        model.to(torch.float16)
    else:
        model = build(path)
    return model

def train(path, loader):
    model = load(path)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def infer(path, base, x):
    return load(path, base)(x)
"""
        ),
        Good(
            """\
import torch

def load(path):
    model = build(path)
    model.to(torch.float16)
    return model
""",
            name="loading.py",
            files={
                "pyproject.toml": "",
                "evaluation.py": "import torch\nfrom loading import load\n"
                "from torch.nn.parallel import DistributedDataParallel as DDP\n\n"
                "def evaluate(path, loader, rank):\n    model = DDP(load(path), device_ids=[rank])\n"
                "    model.eval()\n    with torch.inference_mode():\n        return [model(x) for x in loader]\n",
            },
        ),
        Bad(
            """\
import torch
from torch.nn.parallel import DistributedDataParallel

critic = build_critic().cuda()
critic.half()  # !
critic_optimizer = torch.optim.Adam(critic.parameters())
critic = DistributedDataParallel(critic)
for x in loader:
    for p in critic.parameters():
        p.requires_grad = True
    critic(x).mean().backward()
    critic_optimizer.step()
    for p in critic.parameters():
        p.requires_grad = False
    critic(generator(x)).mean().backward()
    optimizer.step()
""",
            fixed="""\
import torch
from torch.nn.parallel import DistributedDataParallel

critic = build_critic().cuda()
critic_optimizer = torch.optim.Adam(critic.parameters())
critic = DistributedDataParallel(critic)
for x in loader:
    for p in critic.parameters():
        p.requires_grad = True
    critic(x).mean().backward()
    critic_optimizer.step()
    for p in critic.parameters():
        p.requires_grad = False
    critic(generator(x)).mean().backward()
    optimizer.step()
""",
        ),
        Good(
            """\
import dataclasses

import torch

@dataclasses.dataclass
class Config:
    dim: int = 8
    dtype: torch.dtype = torch.float16

class Net(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(config.dim, config.dim)

    def forward(self, x):
        return self.layer(x.to(self.config.dtype))
""",
            name="net.py",
            files={
                "pyproject.toml": "",
                "finetune.py": "import torch\nfrom net import Config, Net\n\nconfig = Config()\n"
                "config.dtype = torch.bfloat16\nmodel = Net(config).to(torch.bfloat16).cuda()\n"
                "optimizer = torch.optim.AdamW(model.parameters())\n"
                "for x in torch.rand(4, 2, 8, device='cuda'):\n    model(x).sum().backward()\n    optimizer.step()\n",
            },
        ),
        Bad(
            """\
import torch

def load_encoder(path):
    model = build_encoder()
    model.load_state_dict(torch.load(path))
    model = model.cuda().eval()
    for p in model.parameters():
        p.requires_grad_(False)
    return model

def run_epoch(model, encoder, loader, optimizer, is_train):
    for x in loader:
        loss = model(encoder(x)).sum()
        if is_train:
            loss.backward()
            optimizer.step()

def main(path, loader):
    encoder, model = load_encoder(path), build_decoder().cuda()
    model.half()  # !
    optimizer = torch.optim.AdamW(model.parameters())
    run_epoch(model, encoder, loader, optimizer, is_train=True)
""",
            fixed="""\
import torch

def load_encoder(path):
    model = build_encoder()
    model.load_state_dict(torch.load(path))
    model = model.cuda().eval()
    for p in model.parameters():
        p.requires_grad_(False)
    return model

def run_epoch(model, encoder, loader, optimizer, is_train):
    for x in loader:
        loss = model(encoder(x)).sum()
        if is_train:
            loss.backward()
            optimizer.step()

def main(path, loader):
    encoder, model = load_encoder(path), build_decoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    run_epoch(model, encoder, loader, optimizer, is_train=True)
""",
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

def main(model, loader):
    accelerator = Accelerator()
    model.to(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
""",
            files={
                "pyproject.toml": "",
                "configs/accelerate.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n",
            },
        ),
        Good(
            """\
import torch

def train(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for images, labels in loader:
        if args.amp:
            images = images.half()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.native_amp):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Good(
            """\
import torch

def train(args, model, optimizer, loader):
    dtype = torch.float16 if args.fp16 else torch.float32
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    for images, boxes in loader:
        images = images.to(dtype)
        boxes = boxes.to(dtype)
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = model(images, boxes).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Good(
            """\
import torch

class Net(torch.nn.Module):
    @classmethod
    def load(cls, config, dtype=None):
        if dtype is None:
            dtype = {"float16": torch.float16, "float32": torch.float32}[config.torch_dtype]
        model = cls()
        model = model.to(dtype=dtype)
        return model

def train(config, args, loader):
    model = Net.load(config, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""
        ),
        Bad(
            """\
import torch

class Net(torch.nn.Module):
    @classmethod
    def load(cls, config, dtype=None):
        if dtype is None:
            dtype = {"float16": torch.float16, "float32": torch.float32}[config.torch_dtype]
        model = cls()
        model = model.to(dtype=dtype)  # !
        return model

def train(config, args, loader):
    model = Net.load(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch

class Net(torch.nn.Module):
    @classmethod
    def load(cls, config, dtype=None):
        if dtype is None:
            dtype = {"float16": torch.float16, "float32": torch.float32}[config.torch_dtype]
        model = cls()
        return model

def train(config, args, loader):
    model = Net.load(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch
from torchvision import transforms

def main(model, loader, normalizer):
    if isinstance(normalizer, transforms.Normalize):
        mean = torch.tensor(normalizer.mean).float()
        print(mean)
    model.half()  # !
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch
from torchvision import transforms

def main(model, loader, normalizer):
    if isinstance(normalizer, transforms.Normalize):
        mean = torch.tensor(normalizer.mean).float()
        print(mean)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def epoch(mode, loader, net, optimizer):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        if mode == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

def evaluate_synset(net, images, loader):
    net.half()  # !
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        epoch("train", images, net, optimizer)
    with torch.no_grad():
        epoch("test", loader, net, optimizer)
""",
            fixed="""\
import torch

def epoch(mode, loader, net, optimizer):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        if mode == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

def evaluate_synset(net, images, loader):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        epoch("train", images, net, optimizer)
    with torch.no_grad():
        epoch("test", loader, net, optimizer)
""",
        ),
        Bad(
            """\
import torch

class ActorCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.half()  # !
        self.optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)

    def train_net(self, states, returns):
        self.optimizer.zero_grad()
        (self.layer(states) - returns).pow(2).mean().backward()
        self.optimizer.step()

def main(env):
    model = ActorCritic()
    for states, returns in env:
        model.train_net(states, returns)
""",
            fixed="""\
import torch

class ActorCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)

    def train_net(self, states, returns):
        self.optimizer.zero_grad()
        (self.layer(states) - returns).pow(2).mean().backward()
        self.optimizer.step()

def main(env):
    model = ActorCritic()
    for states, returns in env:
        model.train_net(states, returns)
""",
        ),
        Bad(
            """\
import torch

def prepare(model, dtype=None):
    if dtype is None:
        print("no dtype")
    dtype = torch.float16
    return model.to(dtype)  # !

def train(model, loader):
    model = prepare(model, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import torch

def prepare(model, dtype=None):
    if dtype is None:
        print("no dtype")
    dtype = torch.float16
    return model

def train(model, loader):
    model = prepare(model, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
""",
        ),
        # A frozen model takes what the trained one makes of the input.
        Bad(
            """\
import torch

def train(net, body_model, loader, optimizer):
    net.train()
    body_model.requires_grad_(False)
    for images, target in loader:
        images = images.cuda()
        images = images.half()  # !
        pose = net(images)
        loss = (body_model(pose) - target).abs().mean() + pose.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
            fixed="""\
import torch

def train(net, body_model, loader, optimizer):
    net.train()
    body_model.requires_grad_(False)
    for images, target in loader:
        images = images.cuda()
        pose = net(images)
        loss = (body_model(pose) - target).abs().mean() + pose.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
        ),
        Good("""\
import torch

def train(net, encoder, loader, optimizer):
    net.train()
    encoder.requires_grad_(False)
    for images, target in loader:
        images = images.cuda()
        images = images.half()
        features = encoder(images)
        loss = (net(features.float()) - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""),
        # The name of an input of a model with FP16 weights, whose cast is reported itself.
        Bad("""\
import torch

def train(model, loader, args):
    if args.half:
        model.half()  # !
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target in loader:
        input_var = x.cuda()
        if args.half:
            input_var = input_var.half()
        output = model(input_var)
        loss = torch.nn.functional.cross_entropy(output.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""),
        # A helper refuses FP16.
        Good("""\
import torch

def resolve(args):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    if dtype not in {torch.float32, torch.bfloat16}:
        raise ValueError("fp32 or bf16")
    return dtype

def train(model, loader, args):
    model = model.to(resolve(args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""),
        # What a function makes of the images, and of the targets, which FP16 rounds.
        Good(
            """\
import torch
from solver import make_optimizer

def build_teachers(names):
    teachers = []
    for name in names:
        net = torch.hub.load("zoo/nets", name).cuda()
        net.half()
        teachers.append(net)
    for teacher in teachers:
        for p in teacher.parameters():
            p.requires_grad = False
    return teachers

def main(student, loader):
    teachers = build_teachers(["edsr", "rcan"])
    optimizer = make_optimizer(student)
    for x in loader:
        loss = sum((student(x) - teacher(x.half()).float()).abs().mean() for teacher in teachers)
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def main(vae, encoder, net, loader):
    for model in (vae, encoder):
        model.requires_grad_(False)
    vae.half()
    encoder.half()
    optimizer = torch.optim.Adam(net.parameters())
    for x in loader:
        net(vae(encoder(x)).float()).sum().backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        images = images.type(torch.HalfTensor).cuda()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
""",
            files={
                "main.py": """\
import torch
from example import train

if __name__ == "__main__":
    net = torch.hub.load("zoo/nets", "net")
    net.half()
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.float()
    train(net, torch.utils.data.DataLoader(torch.load("data.pt")))
"""
            },
        ),
        Bad(
            """\
import pytorch_lightning as pl
import torch

class Encoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)

def train(loader):
    encoder = Encoder().cuda()
    encoder.half()  # !
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for x in loader:
        encoder(x).sum().backward()
        optimizer.step()
""",
            fixed="""\
import pytorch_lightning as pl
import torch

class Encoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)

def train(loader):
    encoder = Encoder().cuda()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for x in loader:
        encoder(x).sum().backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        images = images.type(torch.HalfTensor).cuda()  # !
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
""",
            files={
                "main.py": """\
import torch
from example import train

def export(net):
    net.half()
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.float()
    torch.save(net, "net.pt")

if __name__ == "__main__":
    net = torch.hub.load("zoo/nets", "net")
    train(net, torch.utils.data.DataLoader(torch.load("data.pt")))
    export(net)
"""
            },
            fixed="""\
import torch

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        images = images.cuda()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
""",
        ),
        Bad(
            """\
import torch

def train(model, loader, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = (model(x) - y).pow(2).sum()
        if args.fp16:
            loss = loss.half()  # !
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
        ),
        Bad(_THAWED_BY_HELPER.format(cast="    net.half()  # !\n"), fixed=_THAWED_BY_HELPER.format(cast="")),
        Bad(
            """\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
args = parser.parse_args()
model = torch.nn.Linear(8, 8).cuda().to(getattr(torch, args.dtype))  # !
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
args = parser.parse_args()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        casts = [
            (cast, low)
            for cast in (*facts.events("cast"), *facts.events("construct"))
            if (low := cast.may_be(Dtype.FP16))
        ]
        if not casts or facts.declared == "inference" or facts.may_keep_masters:
            return
        if _runs_in_half_engine(facts):
            return
        found = []
        chosen = set()
        norms = list(_norms_in_float32(facts))
        optimized = {
            each.event
            for each in facts.training_use.weights(Dtype.FP16)
            if facts.training_use.plain_optimizers(each.training) and not facts.training_use.keeps_masters(each)
        }
        for cast, low in casts:
            may_follow = cast not in optimized
            guards = [guard for guard in low if not (may_follow and accelerate_precision.follows_policy(guard))]
            if any(
                cast.scope in call.scope.within() and compatible(facts.guard_of(call), cast.guard) for call in norms
            ):
                continue
            if not facts.training_use.is_module(cast) and _is_started_with_half_weights(cast, facts):
                continue
            training = facts.training_use.cast(cast, Dtype.FP16, guards)
            if (
                training is not None
                and not training.reach.meets("initialize")
                and not any(facts.of(sink.call).may_keep_masters for sink in training.sinks)
                and not input_casts.loses_nothing(cast, Dtype.FP16, guards, training)
            ):
                fix = None if cast.kind == "construct" else python_edits.without_cast(facts, cast)
                found.append((cast, training, fix))
                if input_casts.is_chosen_input(cast, guards):
                    chosen.add(cast)
        modules = [cast for cast, _, _ in found if facts.training_use.is_module(cast)]
        follow = chosen | {cast for cast, _, _ in found if _follows(cast, modules, facts)}
        # A model and its inputs change together.
        all_fixable = not follow and all(fix is not None for _, _, fix in found)
        policy = any(map(facts.events, _POLICIES)) or bool(facts.project.configs_for(facts.path))
        for cast, training, fix in found:
            if cast in follow or (cast in modules and facts.training_use.runs_in_deepspeed):
                continue
            yield self.at(
                cast,
                message="`{expr}` makes FP16 weights in code that trains" if cast.kind == "construct" else None,
                expr=facts.short(cast.call.node),
                notes=(Note("trained with here", training.sink.call.span, facts.elsewhere(training.sink.call)),),
                fix=fix if all_fixable else None,
                help=None if policy else "remove the cast, and compute in FP16 under autocast with a GradScaler",
            )


def _runs_in_half_engine(facts: Facts) -> bool:
    """True if all configs that the file is launched with choose DeepSpeed and FP16: its parameters are FP16 anyway."""
    configs = facts.project.configs_for(facts.path)
    return bool(configs) and all(
        each.distributed_type == "DEEPSPEED" and each.mixed_precision == "fp16" for each in configs
    )


def _follows(cast: Event, weights: list[Event], facts: Facts) -> bool:
    """True if the cast of an input takes its dtype from the variable that gives weights theirs: it follows them."""
    name = _name_of_dtype(cast)
    return (
        bool(name)
        and cast not in weights
        and any(
            name == _name_of_dtype(each)
            and facts.bindings(name, cast.call, cast.call.guard) == facts.bindings(name, each.call, each.call.guard)
            for each in weights
        )
    )


def _name_of_dtype(cast: Event) -> str:
    """Return the name of the variable that gives the dtype of a cast; "" for anything else, as `torch.float16`."""
    given = cast.call.keywords.get("dtype")
    names = map(dotted, (given,) if given is not None else cast.call.positional)
    return next((name for name in names if "dtype" in name and "." not in name), "")


def _is_started_with_half_weights(cast: Event, facts: Facts) -> bool:
    """True if each program of another file that calls the function of a cast has a model with FP32 norms only."""
    above = [cast.scope]  # the function, and those that call it
    for scope in above:
        above += dict.fromkeys(call.scope for call in facts.callers(scope) if call.scope not in above)
    programs = [facts.of(each) for each in above if not facts.callers(each)]
    return facts not in programs and all(
        any(call.scope in above for call in _norms_in_float32(each)) for each in programs
    )


def _norms_in_float32(facts: Facts) -> Iterator[Call]:
    """Yield the calls that cast the norms of a model to FP32: the function is written for FP16 weights around them."""
    scopes = {
        check.scope
        for check in facts.calls.get("isinstance", ())
        if len(check.positional) == 2 and _NORM.search(text_of(check.positional[1]))
    }
    for name in ("float", "to") if scopes else ():
        for call in facts.calls.get(name, ()):
            if call.scope in scopes and any("isinstance" in flag for flag in facts.guard_of(call).flags()):
                given = call.argument(0, "dtype")
                dtypes = facts.dtypes(given, call) if name == "to" and given is not None else ()
                if name == "float" or any(dtype is Dtype.FP32 for _, dtype in dtypes):
                    yield call
