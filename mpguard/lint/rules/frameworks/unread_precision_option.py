from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Facts, Good, Rule, any_of, constant, lazy_pattern, option_values

#: Names of options that select the precision of a run.
_PRECISION = lazy_pattern(
    r"(?:use_|enable_)?(?:mixed_precision|(?:torch_|model_|compute_|train(?:ing)?_|amp_|autocast_|mixed_)?(?:dtype|precision)"
    r"|fp16|bf16|fp8|half_precision|amp|tf32|allow_tf32|float16|bfloat16|float32_matmul_precision)(?:_training)?"
)
#: Defaults that ask for low precision.
_LOW = lazy_pattern(r"(?i)(?:torch\.)?(?:fp16|bf16|fp8|float16|bfloat16|half|16|16-mixed|bf16-mixed|tf32|amp)")


class UnreadPrecisionOption(Rule):
    """An option for the precision is parsed, and nothing in the project reads it.

    ## What it does
    Reports `add_argument("--mixed_precision")` (or `--fp16`, `--amp`, `--dtype`, ...) of a training script if its
    default, or a command in the project, asks for low precision, and no code of the project reads the attribute.

    ## Why is this bad
    The run trains in another precision than the command says: it needs more memory and time, without a message.

    ## Known limits
    Silent if any file of the project has an attribute or item of that name, or hands on all options at once
    (`vars(args)`, `**args.__dict__`, `getattr(args, name)`), other than to a log. The file must create the parser and
    parse with it, in a project (with a pyproject.toml or .git).
    """

    code, name = "MPG518", "unread-precision-option"
    severity = "warning"
    message = "`{option}` is parsed, and nothing in the project reads it: the precision does not depend on it"
    help = (
        "use the value (autocast, `Accelerator(mixed_precision=...)`, the dtype of the weights), or remove the option"
    )
    triggers = (
        any_of(b"add_argument"),
        any_of(b"precision", b"dtype", b"16", b"fp8", b"amp", b"tf32"),
        any_of(b"ArgumentParser"),
        any_of(b"parse_args", b"parse_known_args"),
    )
    triggers_nearby = (any_of(b".backward(", b"Trainer(", b".fit("),)
    examples = (
        Bad(
            """\
import argparse

from loop import train

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])  # !
parser.add_argument("--amp-dtype", default="float16")  # !
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
print(vars(args))
train(args, build(), data())
""",
            files={
                "pyproject.toml": "",
                "loop.py": """\
import torch

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
""",
                "run.sh": """\
torchrun example.py --lr 1e-4 --mixed_precision=bf16
""",
            },
        ),
        Good(
            """\
import argparse

from accelerate import Accelerator
from loop import train

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16")
parser.add_argument("--use-amp", default=True)
parser.add_argument("--dtype", default="fp32")
args = parser.parse_args()
accelerator = Accelerator(mixed_precision=args.mixed_precision)
scale = getattr(args, "use_amp")
train(args, build(), data())
""",
            files={
                "pyproject.toml": "",
                "loop.py": """\
import torch

def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
""",
                "run.sh": """\
torchrun example.py --lr 1e-4 --mixed_precision=bf16
""",
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for call in facts.calls.get("add_argument", ()):
            flags = [str(c[0]) for each in call.positional if (c := constant(each)) and isinstance(c[0], str)]
            name = option_values.destination(call)
            option = next((flag for flag in flags if flag.startswith("--")), "")
            if not option or not _PRECISION.fullmatch(name) or not self._is_asked_for(option, call, facts):
                continue
            if facts.project.drops_option(facts.path, name):
                yield self.at(call, option=option)

    def _is_asked_for(self, option: str, call: Call, facts: Facts) -> bool:
        """True if the default, or a command of the project, asks for low precision."""
        default = constant(call.keywords.get("default"))
        if default is not None and (default[0] is True or _LOW.fullmatch(str(default[0]))):
            return True
        return facts.project.passes_option(facts.path, option.lstrip("-").replace("-", "_"))
