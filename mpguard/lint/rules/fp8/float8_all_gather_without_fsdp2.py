from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Event,
    Facts,
    Fix,
    LaunchConfig,
    Note,
    Object,
    Rule,
    any_of,
    constant,
    fp8_facts,
    python_edits,
)

_SETTING = "enable_fsdp_float8_all_gather"


class Float8AllGatherWithoutFsdp2(Rule):
    """Float8 all-gather is on without FSDP2: under Accelerate the converted weights never train.

    ## What it does
    Reports accelerate's `AORecipeKwargs`, which turns float8 all-gather on by default, passed to an `Accelerator`
    without FSDP2, and torchao's `Float8LinearConfig(enable_fsdp_float8_all_gather=True)` for a model that the file
    trains but does not shard.

    ## Why is this bad
    All-gather replaces the weights by new Parameter objects. `Accelerator.prepare` converts the model after the
    optimizer was built, which keeps the old ones: observed on an H200 with accelerate 1.15, 4 of 4 converted weights
    did not change while the loss fell (biases and norms still learn). With DeepSpeed the run stops. With torchao alone
    the weights train if the optimizer is built after the conversion, but nothing is gathered, and `safetensors` cannot
    save the weights ("invalid python storage").

    ## Fix safety
    Safe: such a run is meant to have `False`.

    ## Known limits
    If the linter finds a launch config, that decides; without one, a launch flag could select FSDP2. Code that
    mentions FSDP, sharding or a `parallelize` helper is not checked, unless these get another model, nor a setting
    from elsewhere.
    """

    code, name = "MPG413", "float8-all-gather-without-fsdp2"
    severity = "error"
    message = "float8 all-gather without FSDP2: {what}"
    help = "set `enable_fsdp_float8_all_gather=False`, or shard with FSDP2"
    triggers = (any_of(b"AORecipeKwargs", _SETTING.encode()),)
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])  # !
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
""",
            fixed="""\
import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(enable_fsdp_float8_all_gather=False)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        handlers = [
            event for event in facts.events("fp8_handler") if facts.called_path(event.call).endswith(".AORecipeKwargs")
        ]
        configs = list(self._trained_configs(facts))
        if (not handlers and not configs) or facts.declared == "inference":
            return
        launched = [self._selects_fsdp2(config) for config in facts.project.configs_for(facts.path)]
        if True in launched:
            return
        for event in handlers:
            if (
                self._turns_on(event, facts)
                and not fp8_facts.may_shard(facts, event.call)
                and not facts.base_unknown(event.scope.owner)
                and self._is_applied(event, facts)
            ):
                notes = (
                    ()
                    if launched
                    else (Note("FSDP2 from a launch flag (`--use_fsdp --fsdp_version 2`) is not visible here"),)
                )
                yield self.at(
                    event, what="the converted weights never train", notes=notes, fix=self._fix(event.call, facts)
                )
        for call, model in configs:
            if fp8_facts.may_shard(facts, call, model):
                continue
            yield self.at(
                call, what="nothing is gathered, and safetensors cannot save the weights", fix=self._fix(call, facts)
            )

    def _turns_on(self, event: Event, facts: Facts) -> bool:
        """True if accelerate's handler turns all-gather on: by default, explicitly, or by its config."""
        call = event.call
        config = call.argument(0, "config")
        if config is not None and constant(config) != (None,):
            made = fp8_facts.float8_configs(facts, config, call)
            return bool(made) and all(each is not None and each.whole and each.on(_SETTING) for each in made)
        given = call.argument(3, _SETTING)
        return not call.starred and (
            given is None or constant(given) == (None,) or fp8_facts.is_true(facts, given, call)
        )

    def _is_applied(self, event: Event, facts: Facts) -> bool:
        """True if the file builds the Accelerator that applies the handler, and is not for inference."""
        return bool(facts.events("accelerator")) and not facts.is_inference(event.call)

    def _trained_configs(self, facts: Facts) -> Iterator[tuple[Call, set[Call]]]:
        """Yield the configs with all-gather that convert a model which this file trains, with what creates it."""
        for event in facts.events("convert"):
            given = event.call.argument(None, "config")
            if given is None or event.subject is None or not event.key or facts.from_outside(event.subject, event.call):
                continue
            made = fp8_facts.float8_configs(facts, given, event.call)
            reach = facts.flow.forward_key(event.key, event.call)
            if reach.outside or not reach.meets("optimizer") or facts.is_inference(event.call):
                continue
            for config in made:
                if len(made) == 1 and config is not None and config.on(_SETTING):
                    atoms = [each.atom for each in facts.evaluate(event.subject, event.call)]
                    yield config.calls[0], {a.call for a in atoms if isinstance(a, Object) and a.call is not None}

    def _selects_fsdp2(self, config: LaunchConfig) -> bool:
        """True if a launch config shards with FSDP2."""
        versions = (config.entry("fsdp_config.fsdp_version"), config.entry("fsdp_config.version"))
        return config.distributed_type == "FSDP" and any(str(e.value) == "2" for e in versions if e is not None)

    def _fix(self, call: Call, facts: Facts) -> Fix | None:
        if call.argument(0, "config") is not None and call.name == "AORecipeKwargs":
            return None
        if _SETTING in call.keywords:
            edits = (python_edits.replaced(call.keywords[_SETTING], call, "False"),)
        elif len(call.positional) > 3:
            return None
        else:
            edits = (python_edits.with_argument(facts, call, f"{_SETTING}=False"),)
        return Fix("Turn float8 all-gather off", "safe", edits)
