from __future__ import annotations

import re
from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Dtype, Facts, Good, Object, Rule, any_of, lazy_pattern

_WITH_WEIGHTS = lazy_pattern(r"^(?:Conv\w*\dd|Linear|LayerNorm|BatchNorm\dd|LSTM|GRU)$")
#: Methods with which a layer may give its input the dtype of its weights.
_CASTS = frozenset({"to", "type", "type_as", "half", "bfloat16", "float"})


class Float32IntoDeepspeedHalf(Rule):
    """A layer gets an FP32 input without autocast, but DeepSpeed has cast its weights to 16 bits.

    ## What it does
    Reports `self.layer(x.float())` in a region `autocast(enabled=False)`, if the program calls `deepspeed.initialize`
    and all DeepSpeed JSONs next to it enable `fp16` or `bf16`.

    ## Why is this bad
    These sections cast all parameters of the model; a disabled autocast does not give the weights back in FP32. The
    product raises "expected mat1 and mat2 to have the same dtype", or "Input type (float) and bias type (c10::Half)
    should be the same". Under `torch.autocast` with FP32 weights the same code is right.

    ## Known limits
    Only layers of torch, and classes of the program that create some and contain no cast. A layer that the file casts
    to FP32 is not reported.
    """

    code, name = "MPG316", "float32-into-deepspeed-half"
    severity = "error"
    preview = True
    message = "`{expr}` gets FP32, but the DeepSpeed config casts its weights to {dtype}: this raises"
    help = "cast the layer to float32 as well, or give it the dtype of its weights"
    triggers = (any_of(b"autocast("), any_of(b"enabled=False", b"autocast(False"), any_of(b".float()", b"float32"))
    triggers_nearby = (any_of(b"deepspeed"),)

    examples = (
        Bad(
            """\
import torch
import torch.nn as nn

class Frontend(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(80, 512, 3)

    def forward(self, x):
        return self.conv(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = Frontend()

    def forward(self, mel):
        with torch.autocast("cuda", enabled=False):
            audio = self.frontend(mel.float())  # !
        return audio.mean()
""",
            name="net.py",
            files={
                "train.py": """\
import deepspeed

from net import Net

net = Net()
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
for x in loader:
    engine.backward(engine(x))
    engine.step()
""",
                "ds_config.json": '{"train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": true}}',
            },
        ),
        Good(
            """\
import torch
import torch.nn as nn

class Frontend(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(80, 512, 3)

    def forward(self, x):
        return self.conv(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = Frontend()

    def forward(self, mel):
        with torch.autocast("cuda", enabled=False):
            audio = self.frontend(mel.float())
        return audio.mean()
""",
            name="net.py",
            files={
                "train.py": """\
import deepspeed

from net import Net

net = Net()
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
for x in loader:
    engine.backward(engine(x))
    engine.step()
""",
                "ds_config.json": '{"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": "auto"}}',
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for scope in facts.scopes:
            owner = scope.owner
            if owner is None or scope.name != "forward":
                continue
            for call in scope.calls:
                if not call.path.startswith("self.") or not call.positional or not self._is_off(call, facts):
                    continue
                dtypes = [each.dtype for each in facts.precision.of(call.positional[0], call)]
                if set(dtypes) != {Dtype.FP32} or not self._has_weights(call, facts):
                    continue
                dtype = self._half(owner.name, facts)
                if dtype and not re.search(rf"{re.escape(call.path)}\.(?:float|to)\(", facts.file_text):
                    yield self.at(call, expr=facts.short(call.node), dtype=dtype)

    def _is_off(self, call: Call, facts: Facts) -> bool:
        """True if the innermost context of a call is an autocast that is disabled."""
        around = facts.regions(call)
        return bool(around) and around[-1].kind == "autocast" and not around[-1].guard.possible

    def _has_weights(self, call: Call, facts: Facts) -> bool:
        """True if a call is of a layer whose weights compute with the input as it is."""
        atoms = [each.atom for each in facts.evaluate(call.func, call)]
        atom = atoms[0] if len(atoms) == 1 else None
        if not isinstance(atom, Object):
            return False
        if atom.cls is None:
            path, _, last = atom.path.rpartition(".")
            return path.startswith("torch.nn") and _WITH_WEIGHTS.match(last) is not None
        names = {each.name for place in atom.cls.descendants() for each in place.calls}
        return any(map(_WITH_WEIGHTS.match, names)) and not names & _CASTS

    def _half(self, name: str, facts: Facts) -> str:
        """Return the dtype to which DeepSpeed casts the models of a program that uses a class; "" if it casts none."""
        for program in (facts, *(facts.users(name) or ())):
            if program.events("initialize") and (dtype := facts.project.deepspeed_half(program.path)):
                return dtype
        return ""
