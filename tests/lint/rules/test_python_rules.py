"""Code as people write it, which the Python rules must distinguish; `# !CODE` marks each reported line."""

from __future__ import annotations

import re
import textwrap

import pytest

from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target

RULES = rules(own_only=True)
MARK = re.compile(r"#\s*!(MPG\d+(?:,MPG\d+)*)\s*$")


def found(code: str) -> set[tuple[int, str]]:
    """Return the findings of the default rules, and of the preview rules that are marked."""
    selectors = Selectors(extend_select=tuple({code for _, code in marked(code)}))
    report = Engine(RULES, Options(selectors)).check(Target("example.py", "python", named=True, data=code.encode()))
    assert not report.defects, report.defects[0].traceback
    return {(finding.line, finding.code) for finding in report.findings}


def marked(code: str) -> set[tuple[int, str]]:
    return {
        (number, each)
        for number, line in enumerate(code.splitlines(), 1)
        if (mark := MARK.search(line))
        for each in mark.group(1).split(",")
    }


SHAPES = {
    "a class of the file, cast where it is created": """
        import torch
        class Net(torch.nn.Module):
            def forward(self, x):
                return x
        model = Net().half().cuda()  # !MPG101
        optimizer = torch.optim.Adam(model.parameters())  # !MPG602
        for x in loader:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
    """,
    "a batch in a dict, cast value by value": """
        import torch
        def train(model, loader):
            optimizer = torch.optim.Adam(model.parameters())
            for batch in loader:
                batch = {k: v.half() for k, v in batch.items()}  # !MPG101
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
    """,
    "casts in a tuple and in a branch": """
        import torch
        def train(args, model, loader, device):
            optimizer = torch.optim.Adam(model.parameters())
            for data, target in loader:
                data, target = data.to(device).half(), target.to(device)  # !MPG101
                data = data.half() if args.small else data  # !MPG101
                loss = torch.nn.functional.mse_loss(model(data), target)
                loss.backward()
                optimizer.step()
    """,
    "a step that Lightning differentiates": """
        import lightning as L
        import torch
        class Lit(L.LightningModule):
            def training_step(self, batch, index):
                x = batch["x"].half()  # !MPG101
                return self.model(x).mean()
            def validation_step(self, batch, index):
                return self.model(batch["x"].half()).mean()
    """,
    "a model for a Trainer": """
        from transformers import AutoModelForCausalLM, Trainer
        model = AutoModelForCausalLM.from_pretrained("gpt2").half()  # !MPG101
        trainer = Trainer(model=model, args=args)
        trainer.train()
    """,
    "the base of a LoRA": """
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM, Trainer
        model = AutoModelForCausalLM.from_pretrained("gpt2").half()
        model = get_peft_model(model, config)
        Trainer(model=model, args=args).train()
    """,
    "a dtype in a class, and one by default": """
        import torch
        class Config:
            dtype = torch.float16
        def cast(x, dtype=torch.half):
            return x.to(dtype)  # !MPG101
        def train(model, loader):
            optimizer = torch.optim.Adam(model.parameters())
            for x in loader:
                y = cast(x)
                loss = model(y, x.to(Config.dtype)).mean()  # !MPG101
                loss.backward()
                optimizer.step()
    """,
    "an optimizer that nothing steps": """
        import torch
        model = load(path).to(device).half()
        model.eval()
        optimizer = torch.optim.Adam(model.parameters())
        learner = Learner(model, optimizer)
        with torch.inference_mode():
            for x, y in loader:
                print(model(x.half().to(device)))
    """,
    "phases of one loop": """
        import torch
        def fit(model, loaders, criterion, optimizer, device, small=False):
            for phase in ["train", "val"]:
                for x, y in loaders[phase]:
                    if small:
                        if phase == "train":
                            x = x.half().to(device)  # !MPG101
                        else:
                            x = [crop.half().to(device) for crop in x]
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        loss = criterion(model(x), y)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
    """,
    "inputs for an engine that runs FP16": """
        import deepspeed
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        if engine.fp16_enabled():
            x = x.half()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    """,
    "parameters of an unknown caller": """
        import torch
        def train_step(model_engine, batch):
            loss = model_engine(batch.half())
            model_engine.backward(loss)
            model_engine.step()
    """,
    "a scaler from a tuple, a class and a dict": """
        import torch
        def setup(model):
            return torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cuda")
        class Holder:
            def __init__(self, model):
                self.optimizer, self.gs = setup(model)
            def run(self, model, loader):
                for x in loader:
                    with torch.autocast("cuda", dtype=torch.float16):
                        loss = model(x).sum()
                    self.gs.scale(loss).backward()
                    self.gs.step(self.optimizer)
                    self.gs.update()
    """,
    "BF16 in the branch that runs, FP16 in the other": """
        import torch
        def main(args, model, loader):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            dtype = torch.bfloat16 if args.bf16 else torch.float16
            scaler = torch.amp.GradScaler("cuda", enabled=not args.bf16)
            for x in loader:
                with torch.autocast("cuda", dtype=dtype):
                    loss = model(x).sum()
                if args.bf16:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
    """,
    "nanoGPT's autocast in a variable": """
        import torch
        from contextlib import nullcontext
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(False) else "float16"
        device_type = "cuda" if "cuda" in device else "cpu"
        ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
        optimizer = model.configure_optimizers(0.1)
        while True:
            with ctx:
                logits, loss = model(X, Y)
            loss.backward()  # !MPG201
            optimizer.step()
    """,
    "a library's module": """
        import torch
        class Attention(torch.nn.Module):
            def forward(self, q, k):
                return torch.softmax(q.half() @ k.half(), -1)
    """,
    "inference, conversion and checkpoints": """
        import copy
        import torch
        def train(model, loader):
            optimizer = torch.optim.Adam(model.parameters())
            for x in loader:
                model(x).mean().backward()
                optimizer.step()
            torch.save({"model": copy.deepcopy(model).half(), "ema": model.half().state_dict()}, "x.pt")
        def predict(model, x):
            return model.half()(x.half())
        def convert(path):
            state = torch.load(path)
            return {k: v.half() for k, v in state.items()}
        def main():
            with torch.inference_mode():
                helper(load().half())
        def helper(model):
            return model.half()
    """,
    "a decorated forward": """
        import torch
        from torch.cuda.amp import autocast  # !MPG302
        class Net(torch.nn.Module):
            @autocast()
            def forward(self, x):
                return self.layer(x)
        def main(loader):
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for x in loader:
                loss = model(x).sum()
                loss.backward()  # !MPG201
                optimizer.step()
    """,
    "a context in a variable": """
        import torch
        from contextlib import nullcontext
        def main(args, loader, model):
            context = torch.autocast("cuda", dtype=torch.float16) if args.amp else nullcontext()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for i, x in enumerate(loader):
                with context:
                    loss = model(x).sum() / 4
                loss.backward()  # !MPG201
                if (i + 1) % 4 == 0:
                    optimizer.step()
    """,
    "a loop in a function, its optimizer from the caller": """
        import torch
        def epoch(model, loader, optimizer):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            for x in loader:
                with torch.autocast(device):
                    loss = model(x).sum()
                loss.backward()  # !MPG201
                optimizer.step()
        def main():
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            epoch(model, loader, optimizer)
    """,
    "a closure": """
        import torch
        def main(loader):
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.LBFGS(model.parameters())
            for x in loader:
                def closure():
                    optimizer.zero_grad()
                    with torch.autocast(device_type="cuda", dtype=torch.half):
                        loss = model(x).sum()
                    loss.backward()  # !MPG201
                    return loss
                optimizer.step(closure)
    """,
    "autocast in a context manager of the file": """
        import contextlib
        import torch
        @contextlib.contextmanager
        def mixed(enabled):
            with torch.autocast("cuda", dtype=torch.float16, enabled=enabled):
                yield
        def main(args, loader):
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for x in loader:
                with mixed(args.amp):
                    loss = model(x).sum()
                loss.backward()  # !MPG201
                optimizer.step()
    """,
    "a scaler by another name, in another function, under the same flag": """
        import torch
        def build(args):
            return torch.amp.GradScaler("cuda", enabled=args.amp)
        def main(args, loader):
            gs = build(args)
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for x in loader:
                with torch.autocast("cuda", enabled=args.amp):
                    loss = model(x).sum()
                if args.amp:
                    gs.scale(loss).backward()
                    gs.step(optimizer)
                    gs.update()
                else:
                    loss.backward()
                    optimizer.step()
    """,
    "early return and exclusive flags": """
        import torch
        def step(args, model, optimizer, scaler, x):
            if not args.fp16:
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
                return
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "a data scaler is not a GradScaler": """
        import torch
        from sklearn.preprocessing import StandardScaler
        scaler = StandardScaler()
        data = scaler.fit_transform(data)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).sum()
            loss.backward()  # !MPG201
            optimizer.step()
    """,
    "Accelerate scales": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(mixed_precision="fp16")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for x in loader:
            with accelerator.autocast():
                loss = model(x).sum()
            accelerator.backward(loss)
            optimizer.step()
    """,
    "hand-written scaling is reported by another rule": """
        import torch
        def main(loader, loss_scale):
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for x in loader:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).sum()
                (loss * loss_scale).backward()  # !MPG212
                for p in model.parameters():
                    p.grad.div_(loss_scale)
                optimizer.step()
    """,
    "a step that bypasses the scaler in one branch only": """
        import torch
        def main(args, loader, model):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scaler = torch.amp.GradScaler("cuda")
            for i, x in enumerate(loader):
                loss = model(x).sum()
                scaler.scale(loss).backward()
                if args.clip:
                    optimizer.step()  # !MPG203
                else:
                    scaler.step(optimizer)
                scaler.update()
    """,
    "a scheduler that steps after the scaler": """
        import torch
        def main(loader, model, ema, profiler, env):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                scaler.scale(model(x).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()  # !MPG216
                ema.step(model)
                profiler.step()
                env.step(x)
    """,
    "float8 in a class, compiled by a decorator on another method": """
        import torch
        from torchao.float8 import convert_to_float8_training as to_fp8
        class Run:
            def __init__(self):
                self.model = torch.nn.Linear(16, 16)
                to_fp8(self.model)
            @torch.compile
            def step(self, x):
                return self.model(x)
    """,
    "float8 in a class, never compiled": """
        import torch
        from torchao.float8 import convert_to_float8_training as to_fp8
        class Run:
            def __init__(self):
                self.model = torch.nn.Linear(16, 16)
                to_fp8(self.model)  # !MPG401
    """,
}


@pytest.mark.parametrize("code", SHAPES.values(), ids=SHAPES)
def test_shape(code: str) -> None:
    code = textwrap.dedent(code)
    assert found(code) == marked(code)


WITHOUT_FIX = {
    "a branch that holds only the cast of an input: the cast of the model has no fix either": """
        import torch
        def main(args, loader):
            model = torch.nn.Linear(8, 8)
            if args.half:
                model.half()
                print("half")
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for x in loader:
                if args.half:
                    x = x.half()
                model(x).sum().backward()
                optimizer.step()
    """,
    "positions get the dtype of the tensor that they are stored in": """
        import torch
        def ids(prompt):
            found = torch.zeros(prompt.shape[0], 3, dtype=torch.bfloat16)
            found[:, 0] = torch.arange(prompt.shape[0], dtype=torch.bfloat16)
            return found
    """,
}


@pytest.mark.parametrize("code", WITHOUT_FIX.values(), ids=list(WITHOUT_FIX))
def test_no_fix(code: str) -> None:
    data = textwrap.dedent(code).encode()
    selectors = Selectors(extend_select=("MPG108",))  # a preview rule
    report = Engine(RULES, Options(selectors)).check(Target("example.py", "python", named=True, data=data))
    assert report.findings
    assert [finding.code for finding in report.findings if finding.fix is not None] == []
