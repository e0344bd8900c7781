from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Facts, Note, Rule, any_of, fp8_facts

_SETTING = "enable_fsdp_float8_all_gather"


class AllGatherWithRowwise(Rule, form_of="MPG413"):
    """Float8 all-gather is enabled with a recipe whose weights are not scaled per tensor.

    A shard of the weight does not have the scales of the other half of its rows. torchao 0.18 refuses it: an
    `AssertionError` that only tensorwise scaling is supported. Assigning the field of a config raises, since the config
    is frozen. Accelerate reads its own `enable_fsdp_float8_all_gather` only if no `config` is given, and otherwise
    ignores it without a warning.

    A recipe whose name comes from elsewhere is not checked.
    """

    in_tests = True
    message = "float8 all-gather with the recipe `{recipe}`, whose weights are not scaled tensorwise"
    help = "turn all-gather off (weights are gathered in BF16), or use the tensorwise recipe"
    triggers = (any_of(_SETTING.encode()), any_of(b"rowwise", b"ROWWISE", b"AXISWISE"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        replaced = [c for c in facts.calls.get("replace", ()) if facts.called_path(c) == "dataclasses.replace"]
        made = [event.call for event in (*facts.events("float8_config"), *facts.events("fp8_handler"))]
        for call in (*replaced, *made):
            if not fp8_facts.is_true(facts, call.keywords.get(_SETTING), call):
                continue
            node = call.keywords.get("config") if call.name not in ("replace", "Float8LinearConfig") else call.node
            configs = fp8_facts.float8_configs(facts, node, call) if node is not None else []
            names = {config.name if config is not None else "" for config in configs}
            if names and names <= {"rowwise", "rowwise_with_gw_hp"}:
                inner = next(config for config in configs if config is not None).calls[-1]
                notes = (Note("the recipe", inner.span),) if inner is not call else ()
                yield self.at(call, recipe=" or ".join(sorted(names)), notes=notes)
