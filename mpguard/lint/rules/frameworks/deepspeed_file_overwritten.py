from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Binding,
    Diagnostic,
    Facts,
    LaunchConfig,
    Rule,
    any_of,
    constant,
    dotted,
    launch_expectations,
)

_MODES = ("fp16", "bf16")
_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--ds_config")


class DeepspeedFileOverwritten(Rule, form_of="MPG862"):
    """Code switches the other precision on in the DeepSpeed config that a launch line names.

    The run computes in a precision that no config asks for. FP16 overflows where BF16 does not, and a change of the
    file has no effect.

    Values other than literals are unknown, as are assignments under an option for the precision.
    """

    message = "this enables `{mode}`, but the DeepSpeed file of the launch line enables {wanted}: it has no effect"
    help = "set the precision in the file only, and remove the assignment"
    triggers = (any_of(b"deepspeed"), any_of(b"fp16", b"bf16"), any_of(b"json"), any_of(b"enabled"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        set_here = [
            (binding, mode)
            for scope in facts.scopes
            for bindings in scope.bindings.values()
            for binding in bindings
            if binding.kind == "item" and (mode := self._mode(binding)) is not None
        ]
        configs = self._files(facts) if set_here else ()
        modes = {config.mixed_precision for config in configs}
        for binding, mode in set_here:
            if (
                len(modes) == 1
                and modes <= set(_MODES) - {mode}
                and launch_expectations.is_unconditional(binding.guard, binding)
                and self._is_read(binding, facts)
            ):
                notes = launch_expectations.places(configs)
                yield self.at(binding, mode=mode, wanted=launch_expectations.wanted(configs), notes=notes)

    def _mode(self, binding: Binding) -> str | None:
        """Return the precision that an assignment to an item switches on."""
        keys: list[object] = []
        node: cst.CSTNode | None = binding.node
        while isinstance(node, cst.Subscript) and len(node.slice) == 1:
            index = node.slice[0].slice
            key = constant(index.value) if isinstance(index, cst.Index) else None
            keys.insert(0, key[0] if key is not None else None)
            node = node.value
        value = binding.value
        if len(keys) == 1 and isinstance(value, cst.Dict):
            given = [each.value for each in value.elements if isinstance(each, cst.DictElement)
                     and constant(each.key) == ("enabled",)]  # fmt: skip
            value = given[0] if len(given) == 1 else None
        elif len(keys) != 2 or keys[1] != "enabled":
            return None
        return str(keys[0]) if keys[0] in _MODES and value is not None and constant(value) == (True,) else None

    def _is_read(self, binding: Binding, facts: Facts) -> bool:
        """True if the config is read from a file."""
        node: cst.CSTNode | None = binding.node
        while isinstance(node, cst.Subscript):
            node = node.value
        bound = [each for each in facts.bindings(dotted(node), binding) if each.kind != "item"]
        calls = [facts.call_of(each.value) for each in bound]
        return bool(calls) and all(call is not None and call.name in ("load", "loads") for call in calls)

    def _files(self, facts: Facts) -> tuple[LaunchConfig, ...]:
        """Return the DeepSpeed files that the launch lines of the script name; none if one is unknown."""
        found = []
        for launch in facts.project.launches_of(facts.path):
            named = [pair[1].text for name in _OPTIONS if (pair := launch.argument(name)) is not None]
            names = [name for name in named if name and name.endswith(".json")]
            config = launch_expectations.deepspeed_config(facts, names[0]) if len(names) == 1 else None
            if config is None:
                return ()
            found.append(config)
        return tuple(found)
