"""DeepSpeed configs that are dicts in Python code, as documents, so that config rules run over them unchanged.

A dict is recognized by its content (`zero_optimization`, `train_micro_batch_size_per_gpu`), or by the call that takes
it (`deepspeed.initialize(config=...)`). Spans are those of the Python file. A value that is not a literal (`args.bf16`,
`**base`), or is set later (`config["bf16"]["enabled"] = ...`), is `UNKNOWN`, which equals no value that a rule tests
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.document import Document
from mpguard.document.nodes import MAX_DEPTH, Node, Pair
from mpguard.document.schemas.deepspeed import KEYS, SECTIONS
from mpguard.lint.facts.program.api_names import TRL_CONFIGS
from mpguard.lint.facts.program.lattice import Constant
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView
    from mpguard.lint.facts.syntax.records import Call, Record

#: Keys that only a DeepSpeed config has. One of them may also be a value that code reports about a run.
_DEEPSPEED_KEYS = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "torch_autocast"})
_SECTIONS = frozenset({"zero_optimization", *SECTIONS})
#: A key that other configs have too, and the sections of which one must be in the same dict.
_COMMON_KEY, _PRECISION_SECTIONS = "train_batch_size", frozenset({"bf16", "fp16"})

#: Callables that take a config: the last name -> the names of the argument, and its position.
_CONFIG_ARGUMENTS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "initialize": (("config", "config_params"), None),
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments", *TRL_CONFIGS), (("deepspeed",), None)),
    "DeepSpeedPlugin": (("hf_ds_config",), 0),
    "HfDeepSpeedConfig": (("config_file_or_dict",), 0),
    "HfTrainerDeepSpeedConfig": (("config_file_or_dict",), 0),
    "DeepSpeedConfig": (("config",), 0),
    "DeepSpeedStrategy": (("config",), None),
}
#: Functions that do not change a dict that is passed to them.
_HARMLESS = frozenset({"print", "pprint", "dumps", "dump", "len", "info", "debug", "dict", "str"})
_CHANGES = frozenset({"update", "pop", "setdefault", "clear", "popitem"})


class Unknown:
    """A value that cannot be derived where the dict is written. Equal only to itself."""

    def __repr__(self) -> str:
        return "(not known here)"


UNKNOWN = Unknown()


def configs(facts: DomainView) -> list[Document]:
    """Return the DeepSpeed configs that a file writes as dicts, each once, in the order of the file."""
    facts.need_all()
    found: dict[cst.Dict, _DictConfig] = {}
    for node, at, name in _dicts(facts):
        written = found.setdefault(node, _DictConfig(facts, node, at))
        written.names |= {name} - {""}
    for call in [call for name in _CONFIG_ARGUMENTS for call in facts.calls.get(name, ())]:
        for node in _given(facts, call):
            if node in found:
                found[node].callees.add(_callee_name(facts, call))
    documents = [document for each in found.values() if (document := each.document()) is not None]
    return sorted(documents, key=lambda document: document.root.start if document.root is not None else 0)


def given_to(facts: DomainView, call: Call) -> Document | None:
    """Return the config that a call such as `deepspeed.initialize` takes, if it is one dict that is fully visible.

    That is, it contains no `**base`, and nothing changes it later. None otherwise.
    """
    nodes = list(_given(facts, call))
    if len(nodes) != 1 or not all(isinstance(each, cst.DictElement) for each in nodes[0].elements):
        return None
    written: _DictConfig | None = None
    for node, at, name in _dicts(facts):
        if node is nodes[0]:
            written = written or _DictConfig(facts, node, at)
            written.names |= {name} - {""}
            written.callees.add(call.name)
    if written is None or written.changed():
        return None
    document = written.document()
    return document if document is not None and "" not in document.given_to else None


def writes_section(facts: DomainView, call: Call, section: str) -> bool:
    """True if the dict that a call takes has a section, or the code adds it: `config["torch_autocast"] = ...`."""
    nodes = list(_given(facts, call))
    if any(
        isinstance(each, cst.DictElement) and constant(each.key) == (section,) for n in nodes for each in n.elements
    ):
        return True
    names = {name for node, _, name in _dicts(facts) if node in nodes} - {""}
    return any(
        binding.kind == "item" and _item_key(binding.node) == (section,)
        for scope in facts.index.scopes
        for name in names & scope.bindings.keys()
        for binding in scope.bindings[name]
    )


def _dicts(facts: DomainView) -> Iterator[tuple[cst.Dict, Record, str]]:
    """Yield all dicts that are bound to a name, returned, or passed, each with its record and name."""
    for scope in facts.index.scopes:
        for key, bindings in scope.bindings.items():
            for binding in bindings:
                if binding.kind == "assign" and isinstance(binding.value, cst.Dict):
                    yield binding.value, binding, key
        for each in scope.returns:
            if isinstance(each.value, cst.Dict):
                yield each.value, each, ""
        for call in scope.calls:
            for value in (*call.positional, *call.keywords.values()):
                if isinstance(value, cst.Dict):
                    yield value, call, ""


def _given(facts: DomainView, call: Call) -> Iterator[cst.Dict]:
    """Yield the dicts that a call with a config argument may take: in place, by name, or returned by a function."""
    names, position = _CONFIG_ARGUMENTS.get(call.name, _CONFIG_ARGUMENTS["initialize"])  # imported under another name
    value = call.argument(position, *names)
    key = dotted(value)
    bindings = facts.values.reaching(key, call.scope, call.order) if key else []
    for each in [value, *(binding.value for binding in bindings if binding.kind == "assign")]:
        if isinstance(each, cst.Dict):
            yield each
        inner = facts.index.call_of.get(each) if isinstance(each, cst.Call) else None
        for function in facts.functions(inner) if inner is not None else ():
            for back in function.scope.returns:
                bound = facts.of(back).values.reaching(dotted(back.value), back.scope, back.order)
                values = [back.value, *(each.value for each in bound if each.kind == "assign")]
                yield from (value for value in values if isinstance(value, cst.Dict))


def _callee_name(facts: DomainView, call: Call) -> str:
    """Return `deepspeed.initialize`, `TrainingArguments` ...; "" for an `initialize` of another library."""
    if call.name != "initialize":
        return call.name
    return call.path if facts.called_path(call) == "deepspeed.initialize" else ""


class _DictConfig:
    """A dict in the code: its record, its names, and the calls that take it."""

    def __init__(self, facts: DomainView, node: cst.Dict, at: Record) -> None:
        self.facts, self.node, self.at = facts, node, at
        self.names: set[str] = set()
        self.callees: set[str] = set()

    def document(self) -> Document | None:
        """Return the config as a document; None if the dict is not a DeepSpeed config."""
        members = {
            key[0]: each.value
            for each in self.node.elements
            if isinstance(each, cst.DictElement) and (key := constant(each.key)) and isinstance(key[0], str)
        }
        sections = {key for key, value in members.items() if isinstance(value, cst.Dict)}
        known = {
            key for key, value in members.items() if key in KEYS and (key not in _SECTIONS or constant(value) is None)
        }
        is_deepspeed = (
            (known & _DEEPSPEED_KEYS and len(known) > 1)
            or (_COMMON_KEY in members and sections & _PRECISION_SECTIONS)
            or self.callees - {""}
        )
        if not is_deepspeed or any("." in key for key in members):
            return None
        root = self._node(self.node, 0)
        callees = set(self.callees)
        if not self._set_changes_unknown(root) or not callees:
            callees.add("")
        source = self.facts.source
        attribute = next((name for name in sorted(self.names) if "." in name and not name.startswith("self.")), "")
        given = tuple(sorted(callees))
        document = Document(source.path, source.text, "python", root, [], given_to=given, attribute=attribute)
        document.__dict__["kind"] = "deepspeed"  # it may be one only because of the call that takes it
        return document

    def changed(self) -> bool:
        """True if the code sets keys of the dict later."""
        return any(
            binding.kind == "item"
            for scope in self.facts.index.scopes
            for name in self.names & scope.bindings.keys()
            for binding in scope.bindings[name]
        ) or any(
            call.name in _CHANGES and dotted(call.receiver) in self.names
            for name in _CHANGES
            for call in self.facts.calls.get(name, ())
        )

    def _node(self, node: cst.BaseExpression, depth: int) -> Node:
        start, end = self.facts.span(node, self.at)
        if isinstance(node, cst.Dict) and depth < MAX_DEPTH:
            return self._mapping(node, Node("mapping", start, end, flow=True), depth)
        if isinstance(node, (cst.List, cst.Tuple)) and depth < MAX_DEPTH:
            items = [self._node(each.value, depth + 1) for each in node.elements]
            return Node("sequence", start, end, flow=True, items=items)
        return Node("scalar", start, end, self._value(node))

    def _value(self, node: cst.BaseExpression) -> object:
        """Return a literal, or the literal that a name stands for under all flags; else `UNKNOWN`."""
        literal = constant(node)
        if literal is not None:
            return literal[0]
        found = self.facts.evaluate(node, self.at) if isinstance(node, cst.Name) else ()
        atom = found[0].atom if len(found) == 1 and found[0].guard == ALWAYS else None
        return atom.value if isinstance(atom, Constant) else UNKNOWN

    def _mapping(self, node: cst.Dict, made: Node, depth: int) -> Node:
        for element in node.elements:
            if not isinstance(element, cst.DictElement):  # `**base` may override any key before it
                _set_unknown(made.pairs)
                continue
            key = constant(element.key)
            if key is None or not isinstance(key[0], str):
                continue
            place = self.facts.span(element.key, self.at)
            pair = Pair(key[0], key[0], place, self._node(element.value, depth + 1))
            made.pairs.append(pair)
            made.members[pair.key] = pair
        return made

    def _set_changes_unknown(self, root: Node) -> bool:
        """Set to unknown what the code changes elsewhere. False if the dict is passed to code that may complete it."""
        known = True
        for scope in self.facts.index.scopes if self.names else ():
            for name in self.names & scope.bindings.keys():
                for binding in scope.bindings[name]:
                    if binding.kind == "item":
                        _set_item_unknown(root, binding.node)
            for call in scope.calls:
                holder: cst.CSTNode | None = call.receiver
                while isinstance(holder, cst.Subscript):
                    holder = holder.value
                if call.name in _CHANGES and dotted(holder) in self.names:
                    _set_item_unknown(root, call.receiver)
                elif call.name not in _CONFIG_ARGUMENTS and call.name not in _HARMLESS:
                    given = (*call.positional, *call.keywords.values())
                    known &= not any(dotted(each) in self.names for each in given)
        return known


def _set_item_unknown(root: Node, changed: cst.CSTNode | None) -> None:
    """Set a section to unknown for `config["bf16"]["enabled"] = ...`.

    For `config[key]` and `config.update()`, set all of them to unknown.
    """
    key = _item_key(changed)
    _set_unknown(pair for pair in root.pairs if key is None or pair.key == key[0])


def _item_key(changed: cst.CSTNode | None) -> tuple[object] | None:
    """Return the first key of `config["bf16"]["enabled"]`, as `constant` does; None if it is not a literal."""
    first: cst.Subscript | None = None
    while isinstance(changed, cst.Subscript):
        first, changed = changed, changed.value
    index = first.slice[0].slice if first is not None and len(first.slice) == 1 else None
    return constant(index.value) if isinstance(index, cst.Index) else None


def _set_unknown(pairs: Iterable[Pair]) -> None:
    for pair in pairs:
        pair.value = Node("scalar", *pair.value.span, UNKNOWN)
