from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Facts,
    Good,
    LaunchConfig,
    Note,
    Rule,
    accelerate_config,
    any_of,
    constant,
    dotted,
    lazy_pattern,
)

#: Names of objects that are prepared and are neither a model nor an optimizer.
_OTHERS = lazy_pattern(r"(?i)(?:loader|_dl|data|sched\w*|dataset)$")


class TePreparedApart(Rule):
    """Accelerate with Transformer Engine needs the model and its optimizer in one call of `prepare`.

    ## What it does
    Reports `accelerator.prepare(optimizer, ...)` without a model, if all accelerate configs that launch the program
    have FP8 with `backend: TE`.

    ## Why is this bad
    Accelerate replaces the layers by those of Transformer Engine, and then the parameters in the optimizer. If only one
    of both is given it raises: "You must pass a model and an optimizer together to `accelerate.prepare()` when using
    TransformerEngine" (accelerate 0.29 to 1.15).

    ## Known limits
    An argument of unknown kind may be a model; then nothing is reported. A `backend` that the config leaves out is not
    looked at.
    """

    code, name = "MPG419", "te-prepared-apart"
    severity = "error"
    message = "Accelerate with Transformer Engine raises here: the model has to be in the same `prepare`"
    help = "write `model, optimizer = accelerator.prepare(model, optimizer)`"
    needs_config = True
    triggers = (any_of(b".prepare("), any_of(b"ccelerat"))
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator

def main(model, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    model = accelerator.prepare(model)
    optimizer, loader = accelerator.prepare(optimizer, loader)  # !
    for x in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
""",
            name="train.py",
            files={
                "pyproject.toml": "",
                "mp.yaml": """\
distributed_type: 'NO'
mixed_precision: fp8
fp8_config:
  backend: TE
""",
                "run.sh": """\
accelerate launch --config_file mp.yaml train.py
""",
            },
        ),
        Good(
            """\
import torch
from accelerate import Accelerator

def main(model, loader):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(loader)
    for x in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
""",
            name="train.py",
            files={
                "pyproject.toml": "",
                "mp.yaml": """\
distributed_type: 'NO'
mixed_precision: fp8
fp8_config:
  backend: TE
""",
                "run.sh": """\
accelerate launch --config_file mp.yaml train.py
""",
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        configs = facts.project.configs_for(facts.path)
        if not configs or not all(map(_is_transformer_engine, configs)):
            return
        if any(
            constant(event.call.keywords.get("mixed_precision")) in _OTHER_MODES
            for event in facts.events("accelerator")
        ):
            return
        for event in facts.events("prepare"):
            call = event.call
            if call.starred or call.keywords:
                continue
            kinds = [_kind(each, call, facts) for each in call.positional]
            if "optimizer" in kinds and set(kinds) <= {"optimizer", "other"}:
                entry = accelerate_config.setting(configs[0].document, "fp8_config", "backend")
                span, path = (entry.key_span, configs[0].path) if entry is not None else (None, None)
                if configs[0].place is not None:
                    path, span = configs[0].place[0], configs[0].place[1].span
                notes = (Note("FP8 is chosen here", span, path),) if path is not None else ()
                yield self.at(call, notes=notes)


def _is_transformer_engine(config: LaunchConfig) -> bool:
    """True if a config, or the flags of a launch line, ask for FP8 with Transformer Engine."""
    if config.mixed_precision != "fp8" or accelerate_config.is_sagemaker(config.document):
        return False
    backend = config.fp8_backend
    return (accelerate_config.fp8_backend(config.document) if backend is None else backend) == "TE"


_OTHER_MODES = (("no",), ("fp16",), ("bf16",))


def _kind(node: cst.BaseExpression, call: Call, facts: Facts) -> str:
    """Return "optimizer", "other" for a loader or a scheduler, or "" for what may be a model."""
    kinds = facts.kinds(node, call)
    if kinds == {"optimizer"}:
        return "optimizer"
    return "other" if kinds == {"scheduler"} or (kinds <= {""} and _OTHERS.search(dotted(node))) else ""
