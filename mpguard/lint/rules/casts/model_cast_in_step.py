from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Diagnostic, Event, Facts, Rule, any_of, lazy_pattern

#: The methods that a framework calls with each batch.
_STEPS = frozenset({"compute_loss", "training_step"})
#: The trained model, by the names that it has in a method of a framework's class.
_MODEL = lazy_pattern(r"(?:self\.)?(?:_?model|net|network)(?:\.module)?")
#: Flags of commands with which the weights in the optimizer are not those of the model.
_SHARDS = ("--deepspeed", "--fsdp", "use_fsdp")


class ModelCastInStep(Rule, form_of="MPG107"):
    """The training step of a framework casts the whole model: the optimizer then updates FP16 or BF16 weights.

    A module is cast in place: the parameters are those that the optimizer holds. From the first step on there are no
    FP32 master weights, and an update below 2^-9 of a BF16 weight is rounded away. With `bf16=True`, or
    `precision="bf16-mixed"`, the framework runs autocast over FP32 weights, and no cast is needed.

    The model must be the argument of the method, or `self.model`. Silent where a command of the project passes
    `--deepspeed` or `--fsdp`, which keep weights of their own, and outside of a project (with a pyproject.toml or
    .git).
    """

    severity = "error"
    message = "`{expr}` makes the weights {dtype} that the optimizer updates"
    help = "leave the weights in FP32 and remove the cast: the framework's autocast computes in low precision"
    triggers = (
        any_of(b"16", b".half()"),
        any_of(b".bfloat16()", b".half()", b".to("),
        any_of(b"def compute_loss", b"def training_step"),
    )
    yields_to = ("MPG101", "MPG107")

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for event in facts.events("cast"):
            scope = event.scope
            if scope.name not in _STEPS or scope.owner is None or not self._is_model(event, facts):
                continue
            dtype = next((each for each in HALF_DTYPES if event.may_be(each)), None)
            if dtype is None or facts.class_kind(scope.owner) not in ("trainer", "framework"):
                continue
            assert event.subject is not None
            if not facts.frozen_params.is_frozen(event.subject) and not self._is_sharded(facts):
                yield self.at(event, expr=facts.short(event.call.node), dtype=dtype.label)

    def _is_model(self, event: Event, facts: Facts) -> bool:
        """True for the argument `model` of a step, for a name of its module, and for `self.model`."""
        if event.subject is None or not _MODEL.fullmatch(event.key):
            return False
        bindings = facts.bindings(event.key, event.call)
        return event.key.startswith("self.") or any(each.kind == "param" for each in bindings)

    def _is_sharded(self, facts: Facts) -> bool:
        """True if a command of the project runs DeepSpeed or FSDP; outside of a project, one may."""
        return any(facts.project.asks_for(facts.path, flag) for flag in _SHARDS)
