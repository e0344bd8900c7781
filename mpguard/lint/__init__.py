"""The linter. Rules import what they need from here:

    from mpguard.lint import Bad, Diagnostic, Facts, Fix, Good, Rule, any_of

The names are imported when they are used: importing this package alone imports neither libcst nor the facts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard import document, targets
    from mpguard.core import settings, tracked_fs
    from mpguard.core.errors import ConfigError, MpguardError, PolicyError, UnknownRecipe, did_you_mean
    from mpguard.core.text_edits import Edit, Span
    from mpguard.document import Document, Entry, mp_yaml
    from mpguard.document.schemas import accelerate as accelerate_keys
    from mpguard.document.schemas import axolotl as axolotl_keys
    from mpguard.document.schemas import deepspeed as deepspeed_keys
    from mpguard.lint.configs import accelerate_config, config_edits, launch_expectations
    from mpguard.lint.facts.dataflow import trace as trace_facts
    from mpguard.lint.facts.dataflow.trace import StepKind, Trace, TraceStep
    from mpguard.lint.facts.domain import autocast_ops, backends, unscaled_steps, wrappers
    from mpguard.lint.facts.domain import fp8 as fp8_facts
    from mpguard.lint.facts.domain.backends import Switch
    from mpguard.lint.facts.domain.compiled_functions import compiled_scopes
    from mpguard.lint.facts.domain.fp8 import Layer
    from mpguard.lint.facts.domain.regions import Region, enabled_argument
    from mpguard.lint.facts.domain.scaler_dtype import bfloat16_region
    from mpguard.lint.facts.domain.training_use import Weights
    from mpguard.lint.facts.domain.wrappers import Wrap, WrapperSettings
    from mpguard.lint.facts.events import Event, EventKind, is_optimizer
    from mpguard.lint.facts.events.compile import launched_compiled
    from mpguard.lint.facts.events.event import aliases, called
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.facts.syntax import imports
    from mpguard.lint.facts.syntax.dtype_triggers import CASTS_LOW_PRECISION, MENTIONS_FP16, MENTIONS_LOW_PRECISION
    from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
    from mpguard.lint.facts.syntax.path_condition import (
        All,
        Any,
        Condition,
        Flag,
        PathCondition,
        compatible,
        implies,
        negated,
    )
    from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope, Use, With
    from mpguard.lint.facts.values import library_names
    from mpguard.lint.facts.values.lattice import Constant, DtypeValue, Function, Method, Object, Ref
    from mpguard.lint.facts.values.options import Option, dtype_options
    from mpguard.lint.facts.values.precision import NUMBER, TensorDtype
    from mpguard.lint.facts.values.scalars import ScalarUse
    from mpguard.lint.model import python_edits
    from mpguard.lint.model.rule import (
        Bad,
        BaseRule,
        ConfigRule,
        Diagnostic,
        EngineRule,
        Fix,
        Good,
        HasSpan,
        LaunchRule,
        Note,
        Rule,
        any_of,
    )
    from mpguard.lint.project import siblings
    from mpguard.lint.project.launch_configs import LaunchConfig
    from mpguard.lint.project.launch_lines import Launch, Word
    from mpguard.policy import recipes
    from mpguard.policy.dtype import HALF_DTYPES, Dtype
    from mpguard.policy.hardware import NEEDS, Hardware, named
    from mpguard.policy.policy import FIELD_NAMES, Policy
    from mpguard.targets import capabilities
    from mpguard.targets.inject import Change
    from mpguard.targets.settings import ABSENT, show

#: Where each name is defined: module -> names.
_NAMES = {
    "mpguard.core.errors": ("ConfigError", "MpguardError", "PolicyError", "UnknownRecipe", "did_you_mean"),
    "mpguard.core.text_edits": ("Edit", "Span"),
    "mpguard.document": ("Document", "Entry"),
    "mpguard.lint.facts.dataflow.trace": ("StepKind", "Trace", "TraceStep"),
    "mpguard.lint.facts.domain.backends": ("Switch",),
    "mpguard.lint.facts.domain.compiled_functions": ("compiled_scopes",),
    "mpguard.lint.facts.domain.fp8": ("Layer",),
    "mpguard.lint.facts.domain.regions": ("Region", "enabled_argument"),
    "mpguard.lint.facts.domain.scaler_dtype": ("bfloat16_region",),
    "mpguard.lint.facts.domain.training_use": ("Weights",),
    "mpguard.lint.facts.domain.wrappers": ("Wrap", "WrapperSettings"),
    "mpguard.lint.facts.events": ("Event", "EventKind", "is_optimizer"),
    "mpguard.lint.facts.events.compile": ("launched_compiled",),
    "mpguard.lint.facts.events.event": ("aliases", "called"),
    "mpguard.lint.facts.file": ("Facts",),
    "mpguard.lint.facts.syntax.dtype_triggers": ("CASTS_LOW_PRECISION", "MENTIONS_FP16", "MENTIONS_LOW_PRECISION"),
    "mpguard.lint.facts.syntax.nodes": ("constant", "dotted", "text_of"),
    "mpguard.lint.facts.syntax.path_condition": (
        "All",
        "Any",
        "Condition",
        "Flag",
        "PathCondition",
        "compatible",
        "implies",
        "negated",
    ),
    "mpguard.lint.facts.syntax.records": ("Binding", "Call", "Record", "Scope", "Use", "With"),
    "mpguard.lint.facts.values.lattice": ("Constant", "DtypeValue", "Function", "Method", "Object", "Ref"),
    "mpguard.lint.facts.values.options": ("Option", "dtype_options"),
    "mpguard.lint.facts.values.precision": ("NUMBER", "TensorDtype"),
    "mpguard.lint.facts.values.scalars": ("ScalarUse",),
    "mpguard.lint.model.rule": (
        "Bad",
        "BaseRule",
        "ConfigRule",
        "Diagnostic",
        "EngineRule",
        "Fix",
        "Good",
        "HasSpan",
        "LaunchRule",
        "Note",
        "Rule",
        "any_of",
    ),
    "mpguard.lint.project.launch_configs": ("LaunchConfig",),
    "mpguard.lint.project.launch_lines": ("Launch", "Word"),
    "mpguard.policy.dtype": ("Dtype", "HALF_DTYPES"),
    "mpguard.policy.hardware": ("Hardware", "NEEDS", "named"),
    "mpguard.policy.policy": ("FIELD_NAMES", "Policy"),
    "mpguard.targets.inject": ("Change",),
    "mpguard.targets.settings": ("ABSENT", "show"),
}

#: Modules of functions, by the names that they have here.
_MODULES = {
    "accelerate_config": "mpguard.lint.configs.accelerate_config",
    "accelerate_keys": "mpguard.document.schemas.accelerate",
    "autocast_ops": "mpguard.lint.facts.domain.autocast_ops",
    "axolotl_keys": "mpguard.document.schemas.axolotl",
    "backends": "mpguard.lint.facts.domain.backends",
    "capabilities": "mpguard.targets.capabilities",
    "config_edits": "mpguard.lint.configs.config_edits",
    "deepspeed_keys": "mpguard.document.schemas.deepspeed",
    "document": "mpguard.document",
    "fp8_facts": "mpguard.lint.facts.domain.fp8",
    "imports": "mpguard.lint.facts.syntax.imports",
    "launch_expectations": "mpguard.lint.configs.launch_expectations",
    "library_names": "mpguard.lint.facts.values.library_names",
    "mp_yaml": "mpguard.document.mp_yaml",
    "python_edits": "mpguard.lint.model.python_edits",
    "recipes": "mpguard.policy.recipes",
    "settings": "mpguard.core.settings",
    "siblings": "mpguard.lint.project.siblings",
    "targets": "mpguard.targets",
    "trace_facts": "mpguard.lint.facts.dataflow.trace",
    "tracked_fs": "mpguard.core.tracked_fs",
    "unscaled_steps": "mpguard.lint.facts.domain.unscaled_steps",
    "wrappers": "mpguard.lint.facts.domain.wrappers",
}

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ABSENT",
    "CASTS_LOW_PRECISION",
    "FIELD_NAMES",
    "HALF_DTYPES",
    "MENTIONS_FP16",
    "MENTIONS_LOW_PRECISION",
    "NEEDS",
    "NUMBER",
    "All",
    "Any",
    "Bad",
    "BaseRule",
    "Binding",
    "Call",
    "Change",
    "Condition",
    "ConfigError",
    "ConfigRule",
    "Constant",
    "Diagnostic",
    "Document",
    "Dtype",
    "DtypeValue",
    "Edit",
    "EngineRule",
    "Entry",
    "Event",
    "EventKind",
    "Facts",
    "Fix",
    "Flag",
    "Function",
    "Good",
    "Hardware",
    "HasSpan",
    "Launch",
    "LaunchConfig",
    "LaunchRule",
    "Layer",
    "Method",
    "MpguardError",
    "Note",
    "Object",
    "Option",
    "PathCondition",
    "Policy",
    "PolicyError",
    "Record",
    "Ref",
    "Region",
    "Rule",
    "ScalarUse",
    "Scope",
    "Span",
    "StepKind",
    "Switch",
    "TensorDtype",
    "Trace",
    "TraceStep",
    "UnknownRecipe",
    "Use",
    "Weights",
    "With",
    "Word",
    "Wrap",
    "WrapperSettings",
    "accelerate_config",
    "accelerate_keys",
    "aliases",
    "any_of",
    "autocast_ops",
    "axolotl_keys",
    "backends",
    "bfloat16_region",
    "called",
    "capabilities",
    "compatible",
    "compiled_scopes",
    "config_edits",
    "constant",
    "deepspeed_keys",
    "did_you_mean",
    "document",
    "dotted",
    "dtype_options",
    "enabled_argument",
    "fp8_facts",
    "implies",
    "imports",
    "is_optimizer",
    "launch_expectations",
    "launched_compiled",
    "library_names",
    "mp_yaml",
    "named",
    "negated",
    "python_edits",
    "recipes",
    "settings",
    "show",
    "siblings",
    "targets",
    "text_of",
    "trace_facts",
    "tracked_fs",
    "unscaled_steps",
    "wrappers",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'mpguard.lint' has no attribute {name!r}")
