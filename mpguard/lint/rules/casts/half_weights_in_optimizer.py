from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    NAMES_HALF,
    Bad,
    Constant,
    Diagnostic,
    Dtype,
    DtypeValue,
    Facts,
    Fix,
    Good,
    Note,
    Rule,
    Weights,
    any_of,
    lazy_pattern,
    python_edits,
)


class HalfWeightsInOptimizer(Rule):
    """A model is loaded in FP16 and its weights are passed to an optimizer.

    ## What it does
    Follows `from_pretrained`, `from_config` and the like with an FP16 dtype (`torch_dtype=torch.float16`,
    `dtype="float16"`, under any name) to an optimizer that is built from the model's parameters, or to a Trainer that
    trains all of them.

    ## Why is this bad
    FP16 weights have no FP32 master copy. An update below 2^-12 of a weight is lost. In FP16, Adam's `eps` of 1e-8 is
    0, and so is the second moment of a gradient of 1e-3: the first step produces infinities (torch 2.13). `GradScaler`
    raises "Attempting to unscale FP16 gradients". Mixed precision keeps the weights in FP32 and computes in FP16.

    ## Fix safety
    The fix loads the weights in FP32. It is unsafe: they take twice the memory, and without autocast the whole model
    computes in FP32.

    ## Known limits
    Silent for adapters (LoRA, a `peft_config`), quantized loads, frozen models, and for arguments that are passed as
    `**kwargs`. Silent in a file that mentions DeepSpeed, FSDP, Megatron or an FP16 optimizer of its own, which may keep
    masters. The optimizers of torch, bitsandbytes, torchao and transformers are recognized; a Trainer is checked if its
    `TrainingArguments` are in the file. A cast by hand is reported by MPG101.
    """

    code, name = "MPG103", "half-weights-in-optimizer"
    severity = "error"
    message = "`{expr}` loads weights in FP16 that an optimizer trains"
    help = "load them in FP32 and let autocast, or the Trainer's `fp16=True`, compute in FP16"
    triggers = (
        any_of(*NAMES_HALF, b'"half', b"'half", b"float16", b"fp16"),
        any_of(b"from_pretrained(", b"from_config(", b"from_single_file("),
        any_of(b"dtype"),
    )
    pattern = lazy_pattern(rb"float16|half(?<!\whalf)|fp16")  # not `rotate_half`
    triggers_nearby = (any_of(b"optim", b"Trainer("), any_of(b".step(", b".train("))
    yields_to = ("MPG507", "MPG862", "MPG863", "MPG864")
    examples = (
        Bad(
            """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16).cuda()  # !
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float32).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
""",
        ),
        Bad(
            """\
import torch as th
from accelerate import Accelerator
from torch.optim import AdamW
from transformers import AutoModel, Trainer, TrainingArguments

HALF = th.half

class Run:
    def __init__(self, config, path):
        self.model = AutoModel.from_config(config, dtype="float16")  # !
        self.net = AutoModel.from_pretrained(path, torch_dtype=HALF)  # !
        self.optimizer = AdamW([p for p in self.model.parameters()])
        self.optimizers = self.build(self.net)

    def build(self, net):
        return AdamW([{"params": net.parameters()}])

    def fit(self, loader):
        for x in loader:
            (self.model(x).sum() + self.net(x).sum()).backward()
            self.optimizer.step()
            self.optimizers.step()

def prepared(args, loader):
    accelerator = Accelerator()
    model = AutoModel.from_pretrained("x", dtype=th.float16 if args.fp16 else th.float32)  # !
    optimizer = AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()

def trainer(data):
    model = AutoModel.from_pretrained("x", dtype="float16")  # !
    args = TrainingArguments("out", learning_rate=1e-5)
    Trainer(model=model, args=args, train_dataset=data).train()
""",
            fixed="""\
import torch as th
from accelerate import Accelerator
from torch.optim import AdamW
from transformers import AutoModel, Trainer, TrainingArguments

HALF = th.half

class Run:
    def __init__(self, config, path):
        self.model = AutoModel.from_config(config, dtype="float32")
        self.net = AutoModel.from_pretrained(path, torch_dtype=th.float32)
        self.optimizer = AdamW([p for p in self.model.parameters()])
        self.optimizers = self.build(self.net)

    def build(self, net):
        return AdamW([{"params": net.parameters()}])

    def fit(self, loader):
        for x in loader:
            (self.model(x).sum() + self.net(x).sum()).backward()
            self.optimizer.step()
            self.optimizers.step()

def prepared(args, loader):
    accelerator = Accelerator()
    model = AutoModel.from_pretrained("x", dtype=th.float32)
    optimizer = AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()

def trainer(data):
    model = AutoModel.from_pretrained("x", dtype="float32")
    args = TrainingArguments("out", learning_rate=1e-5)
    Trainer(model=model, args=args, train_dataset=data).train()
""",
        ),
        Good(
            """\
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTTrainer

def lora(loader):
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    model = get_peft_model(model, LoraConfig())
    train(model, loader)

def adapters(loader):
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    model.add_adapter(LoraConfig())
    train(model, loader)

def resumed(loader):
    base = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    model = PeftModel.from_pretrained(base, "adapter", is_trainable=True)
    train(model, loader)

def quantized(loader):
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16, load_in_8bit=True)
    train(model, loader)

def quantized_by_config(loader):
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16, quantization_config=quantization)
    train(model, loader)

def from_outside(loader, dtype, **kwargs):
    model = AutoModel.from_pretrained("x", torch_dtype=dtype)
    train(model, loader)
    other = AutoModel.from_pretrained("x", torch_dtype=torch.float16, **kwargs)
    train(other, loader)

def cast_up(loader):
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    model.float()
    train(model, loader)
    other = AutoModel.from_pretrained("x", torch_dtype=torch.float16).to(torch.float32)
    train(other, loader)

def frozen(loader, head):
    tower = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    tower.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters())
    for x in loader:
        head(tower(x)).sum().backward()
        optimizer.step()

def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def by_trainer(data, config):
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    SFTTrainer(model=model, args=TrainingArguments("out"), train_dataset=data, peft_config=config).train()

def reference(data, policy):
    reference = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    Trainer(policy, TrainingArguments("out"), reference).train()

def evaluate(data):
    model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
    return model(data)
"""
        ),
        Good(
            """\
import deepspeed
import torch
from transformers import AutoModel

model = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()))
for x in loader:
    engine.backward(engine(x).sum())
    engine.step()
"""
        ),
        Bad(
            """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(name):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)  # !
    return model, tokenizer
""",
            files={
                "pyproject.toml": "",
                "finetune.py": "from transformers import Trainer, TrainingArguments\n\nfrom modeling import load\n\n"
                'model, tokenizer = load("facebook/opt-125m")\n'
                'args = TrainingArguments("out", learning_rate=2e-5, fp16=True)\n'
                "Trainer(model, args, train_dataset=data(tokenizer)).train()\n",
            },
            name="modeling.py",
            fixed="""\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(name):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32)
    return model, tokenizer
""",
        ),
        Good(
            """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(name):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)
    return model, tokenizer
""",
            files={
                "pyproject.toml": "",
                "generate.py": "from modeling import load\n\n"
                'model, tokenizer = load("facebook/opt-125m")\n'
                "print(model.generate(**tokenizer('Once', return_tensors='pt')))\n",
                "finetune.py": "from transformers import Trainer, TrainingArguments\n\n"
                'args = TrainingArguments("out", learning_rate=2e-5, fp16=True)\n'
                "Trainer(build(), args, train_dataset=data()).train()\n",
            },
            name="modeling.py",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.events("load"):
            return
        for weights in facts.training_use.weights(Dtype.FP16):
            optimizers = facts.training_use.plain_optimizers(weights.training) or facts.training_use.trainers(
                weights.training
            )
            if weights.event.kind == "load" and optimizers and not facts.training_use.keeps_masters(weights):
                notes = (Note("trained with here", optimizers[0].span, facts.elsewhere(optimizers[0])),)
                yield self.at(
                    weights.event,
                    expr=facts.short(weights.event.call.func),
                    notes=notes,
                    fix=self._fix(weights, facts),
                )

    def _fix(self, weights: Weights, facts: Facts) -> Fix | None:
        call = weights.event.call
        given = call.argument(None, "dtype", "torch_dtype")
        assert given is not None
        atoms = [each.atom for each in facts.evaluate(given, call)]
        torch = python_edits.name_of_torch(facts)
        if all(isinstance(atom, Constant) for atom in atoms):
            text = '"float32"'
        elif torch is not None and all(isinstance(atom, DtypeValue) for atom in atoms):
            text = f"{torch}.float32"
        else:
            return None
        return Fix("Load the weights in FP32", "unsafe", (python_edits.replaced(given, call, text),))
