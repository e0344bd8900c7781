from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Note, Rule, any_of, fp8_facts

_SETTING = "enable_fsdp_float8_all_gather"


class AllGatherWithRowwise(Rule):
    """Float8 all-gather is enabled with a recipe whose weights are not scaled per tensor.

    ## What it does
    Reports `enable_fsdp_float8_all_gather=True` of torchao's `Float8LinearConfig` if the weight is scaled `AXISWISE`;
    if `dataclasses.replace` adds it to the recipe `rowwise` or `rowwise_with_gw_hp`; if it is assigned to an existing
    config; and if accelerate's `AORecipeKwargs` receives it together with such a config.

    ## Why is this bad
    A shard of the weight does not have the scales of the other half of its rows. torchao 0.18 refuses it: an
    `AssertionError` that only tensorwise scaling is supported. Assigning the field of a config raises, since the config
    is frozen. Accelerate reads its own `enable_fsdp_float8_all_gather` only if no `config` is given, and otherwise
    ignores it without a warning.

    ## Known limits
    A recipe whose name comes from elsewhere is not checked.
    """

    code, name = "MPG414", "all-gather-with-rowwise"
    severity = "error"
    in_tests = True
    message = "float8 all-gather with the recipe `{recipe}`, whose weights are not scaled tensorwise"
    help = "turn all-gather off (weights are gathered in BF16), or use the tensorwise recipe"
    triggers = (any_of(_SETTING.encode()), any_of(b"rowwise", b"ROWWISE", b"AXISWISE"))
    examples = (
        Bad(
            """\
from dataclasses import replace
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity

rowwise = Float8LinearConfig.from_recipe_name("rowwise")
config = replace(rowwise, enable_fsdp_float8_all_gather=True)  # !
by_hand = Float8LinearConfig(  # !
    cast_config_weight=CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
    enable_fsdp_float8_all_gather=True,
)
"""
        ),
        Bad(
            """\
import dataclasses
from accelerate.utils import AORecipeKwargs
from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName

config = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE_WITH_GW_HP)
handler = AORecipeKwargs(config=config, enable_fsdp_float8_all_gather=True)  # !
other = dataclasses.replace(config, enable_fsdp_float8_all_gather=True, pad_inner_dim=True)  # !
"""
        ),
        Good(
            """\
from dataclasses import replace
from torchao.float8 import Float8LinearConfig

tensorwise = replace(Float8LinearConfig.from_recipe_name("tensorwise"), enable_fsdp_float8_all_gather=True)
rowwise = Float8LinearConfig.from_recipe_name("rowwise")
off = replace(rowwise, enable_fsdp_float8_all_gather=False)
chosen = replace(Float8LinearConfig.from_recipe_name(args.recipe), enable_fsdp_float8_all_gather=True)
if args.recipe == "tensorwise":
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
else:
    config = Float8LinearConfig.from_recipe_name("rowwise")
switched = replace(rowwise, enable_fsdp_float8_all_gather=args.recipe == "tensorwise")
"""
        ),
    )

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
