from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    any_of,
    constant,
    library_names,
    lightning,
)

_RUNNERS = ("Trainer", "Fabric")
_PLUGINS = ("MixedPrecisionPlugin", "MixedPrecision")
#: Old spelling -> its meaning in Lightning 2.
_OLD = {"16": "16-mixed", "bf16": "bf16-mixed"}
#: If one of these is possible too, a `-true` may be for inference, and a helper selects it.
_UNCLEAR = lightning.MIXED | {""}
_LOW = {"16-true": Dtype.FP16, "bf16-true": Dtype.BF16}
#: FP16 rounds numbers up to this one to 0.
_ZERO_IN_FP16 = 2.0**-25
#: The packages of Lightning -> the distributions.
_DISTRIBUTIONS = {
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "lightning_fabric": "lightning-fabric",
}
#: The spellings that came with 2.0 -> what Lightning 1 has.
_IN_1 = {
    "16-mixed": "16", "bf16-mixed": '"bf16"', "32-true": "32", "64-true": "64",
    "16-true": "16 (mixed)", "bf16-true": '"bf16" (mixed)',
}  # fmt: skip
#: Arguments of a Trainer that Lightning 2.0 removed: a call with one of them is for an older version.
_BEFORE_2 = frozenset({
    "gpus", "tpu_cores", "ipus", "num_processes", "distributed_backend", "amp_backend", "amp_level", "weights_summary",
    "checkpoint_callback", "progress_bar_refresh_rate", "resume_from_checkpoint", "auto_lr_find", "terminate_on_nan",
    "auto_select_gpus", "auto_scale_batch_size", "replace_sampler_ddp", "flush_logs_every_n_steps",
})  # fmt: skip


class LightningPrecision(Rule):
    """A `precision=` of Lightning that is of another version, or that trains without FP32 master weights.

    ## What it does
    Reports, for Lightning's own `Trainer` and `Fabric`:

    - `precision=16`, `"16"` and `"bf16"`;
    - `"16-mixed"`, `"bf16-true"` and the like, in the code or in a config of the project from which `precision=` comes,
      where the project requires Lightning 1;
    - `"16-true"` and `"bf16-true"` if `fit` of that Trainer, or `backward` of that Fabric, is called;
    - an autocast region in `training_step` if the Trainer in the same file has a mixed precision.

    ## Why is this bad
    Lightning 2 accepts 16 and "bf16" "for historical reasons" and warns: they mean `"16-mixed"` and `"bf16-mixed"`, and
    are easily mistaken for `"16-true"`, which is something else. The `-true` modes store the weights themselves in half
    precision: an update below 2^-8 (BF16) or 2^-11 (FP16) of a weight is lost, and FP16 gradients are not scaled. The
    default eps of Adam, 1e-8, is 0 in FP16: where the second moment underflows, the update is NaN. An
    autocast region inside the one that the Trainer enters overrides it: changing `precision=` has no effect there.
    Lightning 1 stops at the new spellings: "Precision '16-mixed' is invalid" (1.9.5).

    ## Known limits
    A precision from an option is its default; one that only the command line gives is unknown. Files that mention LoRA
    or adapters, whose trained weights may be FP32, and tests are not checked for `-true`. Lightning 1 has only the old
    spellings: they are not reported if the project requires Lightning 1, or if the Trainer has arguments that Lightning
    2 removed. Trainers of other frameworks are ignored.
    """

    code, name = "MPG515", "lightning-precision"
    severity = "warning"
    in_tests = True
    message = "{what}"
    triggers = (any_of(b"lightning"), any_of(b"precision", b"MixedPrecision"), any_of(b"Trainer(", b"Fabric("))
    examples = (
        Bad(
            """\
import lightning as L

trainer = L.Trainer(max_epochs=1, precision=16)  # !
"""
        ),
        Good(
            """\
import argparse

import lightning as L
import torch

class Lit(L.LightningModule):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

parser = argparse.ArgumentParser()
parser.add_argument('--precision', default='16-mixed')
args = parser.parse_args()
L.Trainer(precision=args.precision).fit(Lit())
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        mixed: Call | None = None
        for call in lightning.created(facts, *_RUNNERS):
            values = lightning.precision(facts, call)
            mixed = mixed or (call if values & lightning.MIXED else None)
            given = call.keywords.get("precision")
            if given is None:
                continue
            place = facts.span(given, call)
            if (new := self._of_2(given, values, call, facts)) is not None:
                what = f"`{new}` is a value of Lightning 2, and the project requires Lightning 1, which stops at it"
                yield self.at(place, what=what, severity="error", help=f"require Lightning 2, or write {_IN_1[new]}")
                continue
            if old := sorted(values & set(_OLD)):
                if self._before_2(call, facts):
                    continue
                what = f"`precision={facts.short(given)}` is an old spelling of `{_OLD[old[0]]}`"
                yield self.at(place, what=what, help=f'write `precision="{_OLD[old[0]]}"`')
                continue
            values = lightning.precision(facts, call, defaults=True)
            if values == {""} and (option := _option(given)):  # a config of the project gives it
                values = {each for each in _LOW if facts.project.gives_option(facts.path, option, each)}
            if (low := sorted(values & set(_LOW))) and not values & _UNCLEAR and self._trains(call, facts):
                what = f"`{low[0]}` trains {_LOW[low[0]].label} weights, without FP32 master weights"
                if _LOW[low[0]] is Dtype.FP16 and any(_epsilon_is_zero(each, facts) for each in _adams(facts)):
                    what += "; the eps of Adam is 0 in FP16, so its update divides by zero"
                yield self.at(place, what=what, help=f'"{low[0].replace("true", "mixed")}" keeps them')
        mixed = mixed or next(lightning.created(facts, *_PLUGINS), None)
        if mixed is not None:
            yield from self._regions(mixed, facts)

    def _of_2(self, given: cst.BaseExpression, values: set[str], call: Call, facts: Facts) -> str | None:
        """Return a spelling of Lightning 2 that the code, or a config, gives a Lightning 1."""
        packages = {_DISTRIBUTIONS.get(path.split(".", 1)[0], "lightning") for _, path in facts.paths(call)}
        if call.guard.flags() - {"__name__"} or not all(
            facts.project.required(facts.path, each).before((2,)) for each in packages
        ):
            return None
        if values and values <= set(_IN_1):
            return min(values)
        option = _option(given)
        unhandled = (value for value in _IN_1 if facts.project.gives_unhandled(facts.path, option, value))
        return next(unhandled, None) if values == {""} and option else None

    def _before_2(self, call: Call, facts: Facts) -> bool:
        """True if the code is for Lightning 1."""
        return bool(_BEFORE_2 & set(call.keywords)) or any(
            facts.required(package).before((2,)) for package in _DISTRIBUTIONS.values()
        )

    def _trains(self, made: Call, facts: Facts) -> bool:
        """True if `fit` or `backward` of the object is called, in no test, without adapters and DeepSpeed."""
        if facts.is_inference(made):
            return False
        strategy = made.keywords.get("strategy")
        if strategy is not None and "deepspeed" in facts.text(strategy, made).lower():
            return False  # its engine keeps FP32 masters
        for scope in facts.scopes:
            if any(library_names.ADAPTER_NAMES.search(key) for key in (*scope.bindings, *scope.uses, scope.name)):
                return False
        return any(
            isinstance(each.atom, Object) and each.atom.call is made
            for name in ("fit", "backward")
            for call in facts.calls.get(name, ())
            for each in (facts.evaluate(call.receiver, call) if call.receiver is not None else ())
        )

    def _regions(self, mixed: Call, facts: Facts) -> Iterator[Diagnostic]:
        """Yield autocast regions inside a step that Lightning runs in its own autocast."""
        for region in facts.events("autocast"):
            steps = [scope for scope in region.scope.within() if scope.name == "training_step" and scope.is_method]
            if not steps or steps[0].owner is None or facts.class_kind(steps[0].owner) != "framework":
                continue
            path = facts.called_path(region.call)
            if facts.enabled(region.call, path).joined(region.guard).possible:
                notes = (Note("Lightning's mixed precision is set here", mixed.span),)
                what = f"`{facts.short(region.call.node)}` overrides the autocast that Lightning runs this step in"
                yield self.at(region, what=what, help="remove it; `precision=` sets the precision", notes=notes)


def _option(node: cst.BaseExpression) -> str:
    """Return the name of an option that is read from a config: of `config.train["precision"]`, `precision`."""
    if isinstance(node, cst.Subscript) and isinstance(node.slice[0].slice, cst.Index):
        key = constant(node.slice[0].slice.value)
        return str(key[0]) if key is not None else ""
    return node.attr.value if isinstance(node, cst.Attribute) else ""


def _adams(facts: Facts) -> list[Call]:
    """Return the calls that create an Adam of torch."""
    made = (call for name in ("Adam", "AdamW", "NAdam", "RAdam") for call in facts.calls.get(name, ()))
    return [call for call in made if facts.called_path(call).startswith("torch.optim.")]


def _epsilon_is_zero(adam: Call, facts: Facts) -> bool:
    """True if `eps` is the default, 1e-8, or another number that FP16 rounds to 0."""
    given = adam.keywords.get("eps")
    number = facts.scalars.number(given, adam)
    return (given is None and not adam.starred) or (number is not None and number.value <= _ZERO_IN_FP16)
