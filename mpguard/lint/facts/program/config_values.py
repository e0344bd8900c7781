"""The settings that code reads from a YAML or JSON file of its tree, with `yaml`, `json`, OmegaConf or Hydra."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import mappings
from mpguard.lint.facts.program.lattice import Alternative, Alternatives, ConfigValue, Constant, DictValue
from mpguard.lint.facts.program.option_values import option_defaults
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: What reads a config from a file, from its text or from its path.
_READERS = frozenset({
    "yaml.safe_load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "json.load", "json.loads",
    "omegaconf.OmegaConf.load",
})  # fmt: skip
#: What gives its first argument with the same keys, mostly as attributes.
_VIEWS = lazy_pattern(
    r"(?:^|\.)(?:OmegaConf\.(?:create|to_container|merge|structured)|SimpleNamespace|Namespace|EasyDict|edict|Munch"
    r"|munchify|AttrDict|DotDict|DotMap|ConfigDict|Box|dict|deepcopy)$"
)
_CONFIG = lazy_pattern(r"\.(?:ya?ml|json)$")
#: How deep names of files are followed through names, parameters and calls; how deep defaults of Hydra are nested.
_DEPTH = 6


def of_call(path: str, call: Call, facts: ProgramView) -> Alternatives:
    """Return the config that a call of a library reads, or hands on; nothing if it does neither."""
    if path in _READERS:
        names = dict.fromkeys(_files(call.argument(0, "stream", "fp", "s", "file_"), call, facts, _DEPTH))
        files = [facts.project.config_named(facts.path, name) for name in names]
        return tuple(_mapping(each.require()) for each in files if each is not None)
    if path == "dict" and (made := mappings.of_dict_call(call, facts)):
        return made
    if _VIEWS.search(path):
        starred = [arg.value for arg in call.node.args if arg.star == "**"]
        given = starred[0] if len(starred) == 1 else call.argument(0, "content", "obj")
        found = facts.evaluate(given, call) if given is not None else ()
        return tuple(each for each in found if isinstance(each.atom, DictValue))
    return ()


def of_hydra(scope: Scope, facts: ProgramView) -> Alternatives:
    """Return the config that Hydra gives a function with `@hydra.main(config_path=..., config_name=...)`."""
    for decorator in scope.decorators:
        if not isinstance(decorator, cst.Call) or dotted(decorator.func) not in ("hydra.main", "main"):
            continue
        given = {each.keyword.value: constant(each.value) for each in decorator.args if each.keyword is not None}
        folder, name = given.get("config_path"), given.get("config_name")
        if name is not None and isinstance(name[0], str):
            found = _composed(str(folder[0]) if folder and folder[0] else "", name[0], facts, _DEPTH)
            return (_mapping(found),) if found else ()
    return ()


def _mapping(values: Mapping[Any, Any]) -> Alternative:
    return Alternative(ALWAYS, DictValue(tuple((key, functools.partial(_part, each)) for key, each in values.items())))


def _part(value: object) -> Alternatives:
    if isinstance(value, dict):
        return (_mapping(value),)
    return (Alternative(ALWAYS, ConfigValue(value)),) if isinstance(value, (str, int, float, bool, type(None))) else ()


def _composed(folder: str, name: str, facts: ProgramView, depth: int) -> dict[Any, Any]:
    """Return a config of Hydra with the configs of its `defaults`: `- model: base` is `model/base.yaml`, as `model`."""
    file = facts.project.config_named(facts.path, posixpath.join(folder, f"{name.removesuffix('.yaml')}.yaml"))
    own = dict(file.require()) if file is not None else {}
    found: dict[Any, Any] = {}
    defaults = own.pop("defaults", ())
    for each in defaults if isinstance(defaults, list) and depth else ():
        if isinstance(each, str) and each != "_self_":
            _merge(found, _composed(folder, each, facts, depth - 1))
        for group, choice in each.items() if isinstance(each, dict) else ():
            key = str(group).split()[-1].split("@")[0]
            if isinstance(choice, str):
                inner = _composed(posixpath.join(folder, key), choice, facts, depth - 1)
                _merge(found.setdefault(key.split("/")[-1], {}), inner)
    _merge(found, own)
    return found


def _merge(into: dict[Any, Any], other: Mapping[Any, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _files(node: cst.CSTNode | None, at: Record, facts: ProgramView, depth: int) -> Iterator[str]:
    """Yield the names of the config files that an expression may name, open or contain the text of."""
    if node is None or depth == 0:
        return
    for each in facts.evaluate(node, at):
        if isinstance(each.atom, Constant) and isinstance(each.atom.value, str) and _CONFIG.search(each.atom.value):
            yield each.atom.value
    if isinstance(node, cst.Call):
        call = facts.call_of(node)
        last = dotted(node.func).rsplit(".", 1)[-1]
        if call is None:
            return
        if last == "join":
            yield from _files(call.positional[-1] if call.positional else None, at, facts, depth - 1)
        elif last in ("open", "Path", "str", "abspath", "expanduser") and call.positional:
            yield from _files(call.positional[0], at, facts, depth - 1)
        elif last in ("open", "read", "read_text", "resolve", "expanduser"):
            yield from _files(call.receiver, at, facts, depth - 1)
    elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        yield from _files(node.right, at, facts, depth - 1)
    elif name := dotted(node):
        bindings = facts.bindings(name, at)
        for binding in bindings:
            yield from _bound_files(binding, facts, depth)
        if not bindings and isinstance(node, cst.Attribute):
            defaults = option_defaults(node.attr.value, facts)
            yield from (each[0] for each in defaults if each and isinstance(each[0], str) and _CONFIG.search(each[0]))


def _bound_files(binding: Binding, facts: ProgramView, depth: int) -> Iterator[str]:
    if binding.kind in ("assign", "with"):
        yield from _files(binding.value, binding, facts, depth - 1)
    elif binding.kind == "param":
        for call in facts.callers(binding.scope):
            given = facts.argument_for(call, binding)
            yield from _files(given, call, facts.of(call), depth - 1)
