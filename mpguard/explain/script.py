"""What the training script itself sets, by the linter's facts. The script is not imported or run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import libcst as cst

from mpguard.core import tracked_fs
from mpguard.core.errors import ConfigError
from mpguard.document import Document
from mpguard.document.schemas.deepspeed import OBJECTS
from mpguard.document.values import misspelling_of
from mpguard.explain.argument_files import of_files
from mpguard.explain.model import Given, Origin, SettingLayer, UnknownValue
from mpguard.lint.configs.launch_expectations import is_unconditional
from mpguard.lint.facts.behaviour.events.event import Event
from mpguard.lint.facts.behaviour.regions import enabled_argument
from mpguard.lint.facts.domain import bridge_configs
from mpguard.lint.facts.domain.backends import switches
from mpguard.lint.facts.file import Facts
from mpguard.lint.facts.program.api_names import TRL_CONFIGS
from mpguard.lint.facts.program.dtypes import AnyDtype, only_dtype
from mpguard.lint.facts.program.lattice import Atom, Constant, DtypeValue, Ref
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.project.project import Project
from mpguard.lint.source.source import Source
from mpguard.lint.source.text import Unparsable
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.syntax.records import Call, Record, Scope

Arguments = Mapping[str, Given]
_Answer = TypeVar("_Answer")

#: Arguments of `Accelerator` that concern precision, with their positions.
_ACCELERATOR = {"mixed_precision": 2, "deepspeed_plugin": 6, "fsdp_plugin": 7, "dynamo_backend": 17}
#: Arguments of the handlers in the order of their fields.
HANDLERS: Mapping[str, tuple[str, ...]] = {
    "AORecipeKwargs": ("config", "module_filter_func", "pad_inner_dim", "enable_fsdp_float8_all_gather"),
    "TERecipeKwargs": (
        "use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo",
        "override_linear_precision", "use_mxfp8_block_scaling",
    ),
    "MSAMPRecipeKwargs": ("opt_level",),
    "FP8RecipeKwargs": (),
    "GradScalerKwargs": ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
}  # fmt: skip
#: What parses a command line.
_PARSERS = ("ArgumentParser", "HfArgumentParser", "TrlParser", "parse_args", "parse_known_args", "Fire", "Typer")
#: Arguments of `TrainingArguments` that concern precision.
TRAINER = (
    "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "torch_compile", "torch_compile_backend", "deepspeed",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Script:
    """What a script sets.

    accelerator, deepspeed_plugin: arguments of `Accelerator`, of `DeepSpeedPlugin`; None if it creates none.
    arguments: those of `TrainingArguments`; None without a Trainer. parses_arguments: they come from the command line.
    handlers: `kwargs_handlers`, by class. fsdp_plugin: arguments of `FullyShardedDataParallelPlugin`, with the dtypes
    of its policy as `param_dtype`, .... calls_initialize: it calls `deepspeed.initialize`. initialize: its `config`.
    engine_creates: the objects that it creates from its config, because the call passes none: `optimizer`, `scheduler`.
    activate: the recipe of `mpguard.activate`. switches: TF32. autocasts: the dtypes of autocast regions. loads: those
    of loaded models.
    trl: a config class of TRL, or one that is derived from it, whose `bf16` is on unless `fp16` is (trl 1.16,
    `trainer/base_config.py`). trl_parser: TRL's parser creates them. defaults: those of a class of its own.
    reads_command_line: it parses arguments of its own, as far as is known. misspelled: arguments of transformers' or
    TRL's own classes that they do not have, as written, with the name that is meant.
    """

    path: str
    accelerator: Arguments | None = None
    arguments: Arguments | None = None
    parses_arguments: bool = False
    handlers: Mapping[str, Arguments] = dataclasses.field(default_factory=dict)
    fsdp_plugin: Arguments | None = None
    deepspeed_plugin: Arguments | None = None
    calls_initialize: bool = False
    initialize: Given | None = None
    engine_creates: tuple[str, ...] = ()
    activate: Given | None = None
    switches: tuple[Given, ...] = ()
    autocasts: tuple[Given, ...] = ()
    loads: tuple[Given, ...] = ()
    trl: Given | None = None
    trl_parser: bool = False
    defaults: Arguments = dataclasses.field(default_factory=dict)
    reads_command_line: bool = False
    misspelled: tuple[Given, ...] = ()

    @property
    def uses_accelerate(self) -> bool:
        """True if the script creates an `Accelerator`, or a Trainer does."""
        return self.accelerator is not None or self.has_trainer

    @property
    def creates_engine(self) -> bool:
        """True if the script creates DeepSpeed's engine itself, without accelerate or a Trainer."""
        return self.calls_initialize and not self.uses_accelerate

    @property
    def has_trainer(self) -> bool:
        """True if the script creates `TrainingArguments`, in code or from its command line."""
        return self.arguments is not None or self.parses_arguments

    def trainer_arguments(self, words: Sequence[Given]) -> dict[str, Given]:
        """Return the arguments of `TrainingArguments`. words: the script's command line."""
        found = {**self.defaults, **(self.arguments or {})}
        if self.parses_arguments:
            found |= {**of_files(words, TRAINER, self.trl_parser), **parse_words(words)}
        found = {name: given for name, given in found.items() if given.value is not None}
        if self.trl is not None and "bf16" not in found:
            fp16 = found["fp16"].value if "fp16" in found else False
            unknown = isinstance(fp16, UnknownValue)
            found["bf16"] = dataclasses.replace(self.trl, value=_unknown(f"not {fp16}") if unknown else not fp16)
        return found


def parse_words(words: Sequence[Given]) -> dict[str, Given]:
    """Return the precision arguments on a command line, as transformers' HfArgumentParser reads them."""
    found: dict[str, Given] = {}
    for place, word in enumerate(words):
        name, equals, value = str(word.value).partition("=")
        option = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or option.removeprefix("no_") not in TRAINER:
            continue
        if option.startswith("no_"):
            found[option.removeprefix("no_")] = Given(False, word.origin)
            continue
        if not equals and place + 1 < len(words) and not str(words[place + 1].value).startswith("--"):
            value = str(words[place + 1].value)
        elif not equals:
            value = "true"
        flag = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        found[option] = Given(flag.get(value.lower(), value), word.origin)
    return found


def read_script(path: Path) -> Script:
    """Return what a script sets. Raises `ConfigError` for a file that cannot be read as Python."""
    return _read(path, lambda facts: _Reader(facts).script())


def bridge_config(path: Path) -> Document | None:
    """Return the last precision that a script gives to Megatron Bridge as a document; None without one.

    Raises `ConfigError` as `read_script` does.
    """
    found = _read(path, bridge_configs.documents)
    whole = [document for document in found if not document.attribute]
    return next(reversed(whole or found), None)


def _read(path: Path, question: Callable[[Facts], _Answer]) -> _Answer:
    """Return the answer to a question about the facts of a file. Raises `ConfigError` if they cannot be read."""
    try:
        data = tracked_fs.read(path)
        return question(Facts(Source.parse(data, str(path)), Project()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Unparsable as error:
        raise ConfigError(
            f"{error.path or path}:{error.line}: is not Python that mpguard can read: {error.message}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be read") from None


class _Reader:
    """Reads the facts of one file."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def script(self) -> Script:
        facts = self.facts
        accelerators, trainers = facts.events("accelerator"), [*facts.events("arguments"), *self._own_calls()]
        plugin, initialize = self._fsdp_plugin(), facts.events("initialize")
        return Script(
            path=facts.path,
            accelerator=self._merged(accelerators, _ACCELERATOR, "code") if accelerators else None,
            arguments=self._merged(trainers, dict.fromkeys(TRAINER), "TrainingArguments") if trainers else None,
            parses_arguments=any(facts.calls.get(name) for name in ("HfArgumentParser", "TrlParser")),
            handlers=self._handlers(),
            fsdp_plugin=plugin,
            deepspeed_plugin=self._deepspeed_plugin(),
            calls_initialize=bool(initialize),
            initialize=self._argument(initialize[0].call, "config", None) if initialize else None,
            engine_creates=_engine_creates(initialize[0].call) if initialize else (),
            activate=self._activate(),
            switches=tuple(self._switches()),
            autocasts=tuple(self._autocasts()),
            loads=tuple(self._dtypes(facts.events("load"))),
            trl=next(self._trl(trainers), None),
            trl_parser=bool(facts.calls.get("TrlParser")),
            defaults=self._defaults(),
            reads_command_line=any(facts.calls.get(name) for name in _PARSERS) or "sys.argv" in facts.source.text,
            misspelled=tuple(self._misspelled(trainers)),
        )  # fmt: skip

    def _origin(self, node: cst.CSTNode, at: Record, layer: SettingLayer) -> Origin:
        return Origin(layer, self.facts.path, self.facts.source.position(self.facts.span(node, at)[0])[0])

    def _merged(
        self, events: Iterable[Event], names: Mapping[str, int | None], layer: SettingLayer
    ) -> dict[str, Given]:
        """Return the arguments of the calls that create an object; one that differs between them is unknown."""
        found: dict[str, Given] = {}
        for event in events:
            for name, position in names.items():
                given = self._argument(event.call, name, position, layer)
                if given is None:
                    continue
                if not is_unconditional(event.guard, event.call):
                    given = dataclasses.replace(given, value=_unknown(f"{given.value!r}, under a condition"))
                if name in found and found[name].value != given.value:
                    given = dataclasses.replace(given, value=_unknown("the script creates several"))
                found[name] = given
        return found

    def _trl(self, trainers: Iterable[Event]) -> Iterator[Given]:
        """Yield the config classes of TRL that the script creates, or has its parser create, with their places."""
        for event in trainers:
            known = event.call.name in self._trl_classes or (
                event.call.name in TRL_CONFIGS and self.facts.called_path(event.call).startswith("trl.")
            )
            if known and not event.call.starred:
                yield Given(None, self._origin(event.call.node, event.call, "TrainingArguments"), event.call.name)
        for call in (*self.facts.calls.get("TrlParser", ()), *self.facts.calls.get("HfArgumentParser", ())):
            for node in call.positional[:1]:
                classes = [each.value for each in getattr(node, "elements", ())] or [node]
                for name in (dotted(each).rpartition(".")[2] for each in classes):
                    if name in TRL_CONFIGS | self._trl_classes:
                        yield Given(None, self._origin(call.node, call, "TrainingArguments"), name)

    def _misspelled(self, trainers: Iterable[Event]) -> Iterator[Given]:
        """Yield the arguments that are misspellings of one of `TRAINER`. A class of the file may have others."""
        for event in trainers:
            call = event.call
            path = self.facts.called_path(call)
            if call.name in self._own_classes or not path.startswith(("transformers.", "trl.")):
                continue
            for name, node in call.keywords.items():
                if (meant := misspelling_of(name, TRAINER, 0.85)) is not None:
                    yield Given(name, self._origin(node, call, "TrainingArguments"), meant)

    @functools.cached_property
    def _own_classes(self) -> dict[str, tuple[Scope, str]]:
        """The classes of the file that derive from arguments of transformers or TRL, with the names of those."""
        found = {}
        for scope in self.facts.index.scopes:
            if scope.kind != "class" or not scope.base_names:
                continue
            for path in self.facts.ancestry(scope):
                package, name = path.partition(".")[0], path.rpartition(".")[2]
                if (package == "trl" and name in TRL_CONFIGS) or (
                    package == "transformers" and name.endswith("TrainingArguments")
                ):
                    found[scope.name] = scope, name
        return found

    @functools.cached_property
    def _trl_classes(self) -> frozenset[str]:
        return frozenset(name for name, (_, base) in self._own_classes.items() if base in TRL_CONFIGS)

    def _own_calls(self) -> Iterator[Event]:
        """Yield the objects that the script creates of these classes."""
        for name in self._own_classes:
            for call in self.facts.calls.get(name, ()):
                yield Event("arguments", call, self.facts, call.node)

    def _defaults(self) -> dict[str, Given]:
        """Return the fields with a default in the bodies of these classes: `bf16: bool = False`, or in `field(...)`."""
        found: dict[str, Given] = {}
        for scope, _ in self._own_classes.values():
            for name in TRAINER:
                for binding in scope.bindings.get(name, ()):
                    node = binding.value
                    if isinstance(node, cst.Call) and dotted(node.func).rpartition(".")[2] == "field":
                        named = (each.value for each in node.args if each.keyword and each.keyword.value == "default")
                        node = next(named, None)
                    if node is not None:
                        origin = self._origin(node, binding, "TrainingArguments")
                        found[name] = Given(self._value(node, binding), origin)
        return found

    def _argument(self, call: Call, name: str, position: int | None, layer: SettingLayer = "code") -> Given | None:
        node = call.argument(position, name)
        if node is None:
            if call.starred and layer == "TrainingArguments" and name in ("bf16", "fp16"):
                return Given(_unknown("**"), self._origin(call.node, call, layer))
            return None
        return Given(self._value(node, call), self._origin(node, call, layer))

    def _value(self, node: cst.BaseExpression, at: Record) -> Any:
        """Return the value of an expression if there is only one; else its code, as unknown."""
        values = [_plain(each.atom) for each in self.facts.evaluate(node, at)]
        same = all(value == values[0] and type(value) is type(values[0]) for value in values)
        if not values or not same or isinstance(values[0], UnknownValue):
            return _unknown(self.facts.short(node))
        return values[0]

    def _handlers(self) -> dict[str, dict[str, Given]]:
        found: dict[str, dict[str, Given]] = {}
        for name, fields in HANDLERS.items():
            for call in self.facts.calls.get(name, ()):
                if not self.facts.called_path(call).startswith("accelerate"):
                    continue
                names = {field: position for position, field in enumerate(fields)}
                extra = dict.fromkeys(each for each in call.keywords if each not in names)
                arguments = {
                    each: given
                    for each, position in {**names, **extra}.items()
                    if (given := self._argument(call, each, position)) is not None
                }
                found[name] = {"": Given(name, self._origin(call.node, call, "code")), **arguments}
        return found

    def _fsdp_plugin(self) -> dict[str, Given] | None:
        calls = [
            call
            for call in self.facts.calls.get("FullyShardedDataParallelPlugin", ())
            if self.facts.called_path(call).startswith("accelerate")
        ]
        if not calls:
            return None
        call = calls[0]
        found = {"": Given("", self._origin(call.node, call, "code"))}
        for name in ("fsdp_version", "mixed_precision_policy"):
            given = self._argument(call, name, None)
            if given is not None:
                found[name] = given
        policies = self.facts.events("policy")
        if "mixed_precision_policy" in found and isinstance(found["mixed_precision_policy"].value, UnknownValue):
            for event in policies[:1]:
                for position, name in enumerate(("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")):
                    given = self._argument(event.call, name, position if position < 2 else None)
                    found[name] = given or Given(None, self._origin(event.call.node, event.call, "code"))
                del found["mixed_precision_policy"]
        return found

    def _deepspeed_plugin(self) -> dict[str, Given] | None:
        for call in self.facts.calls.get("DeepSpeedPlugin", ()):
            if self.facts.called_path(call).startswith("accelerate"):
                config = self._argument(call, "hf_ds_config", 0)
                found = {"": Given("", self._origin(call.node, call, "code"))}
                return found if config is None else {**found, "hf_ds_config": config}
        return None

    def _activate(self) -> Given | None:
        for call in self.facts.calls.get("activate", ()):
            if self.facts.called_path(call) == "mpguard.activate" or dotted(call.func) == "mpguard.activate":
                return self._argument(call, "policy", 0) or Given(None, self._origin(call.node, call, "code"))
        return None

    def _switches(self) -> Iterable[Given]:
        for switch in switches(self.facts):
            if not switch.read and ("tf32" in switch.path or "matmul_precision" in switch.path):
                line = self.facts.source.position(switch.span[0])[0]
                value = _unknown(switch.path) if switch.value is None else switch.value
                yield Given(value, Origin("code", self.facts.path, line), switch.path)

    def _dtypes(self, events: Iterable[Event]) -> Iterable[Given]:
        for event in events:
            if any(dtype for _, dtype in event.dtypes):
                yield self._given(event, self._dtype_of(event))

    def _autocasts(self) -> Iterable[Given]:
        """Yield the dtype of each autocast; `off` for one that is switched off."""
        for event in self.facts.events("autocast"):
            dtype, switch = self._dtype_of(event), enabled_argument(event.call, self.facts.called_path(event.call))
            enabled = True if switch is None else self._value(switch, event.call)
            if isinstance(enabled, UnknownValue):
                named = self.facts.short(event.call.node) if isinstance(dtype, UnknownValue) else dtype
                dtype = _unknown(f"{named}, if {self.facts.short(switch)}" if switch is not None else str(named))
            yield self._given(event, dtype if enabled else "off")

    def _dtype_of(self, event: Event) -> Any:
        known = only_dtype(event.dtypes)
        return _unknown(self.facts.short(event.call.node)) if known is None else _short(known)

    def _given(self, event: Event, value: Any) -> Given:
        return Given(value, self._origin(event.call.node, event.call, "code"), event.call.path or event.call.name)


def _engine_creates(call: Call) -> tuple[str, ...]:
    passed = OBJECTS if call.starred else [name for name, each in OBJECTS.items() if call.argument(each[1], each[0])]
    return tuple(name for name in OBJECTS if name not in passed)


def _plain(atom: Atom) -> Any:
    """Return the value that an expression stands for: a constant, the name of a dtype, a member of an enumeration."""
    if isinstance(atom, Constant):
        return atom.value
    if isinstance(atom, DtypeValue):
        return _short(atom.dtype)
    if isinstance(atom, Ref) and atom.path.startswith("accelerate") and atom.path.rpartition(".")[2].isupper():
        return atom.path.rpartition(".")[2].lower()  # DynamoBackend.INDUCTOR
    return UnknownValue()


def _short(dtype: AnyDtype) -> str:
    return dtype.short if isinstance(dtype, Dtype) else dtype.torch_name


def _unknown(text: str) -> UnknownValue:
    return UnknownValue(f"unknown: {text}")
