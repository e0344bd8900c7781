"""What rules import from `mpguard.lint`: a rule uses these names and no others.

Names that end in `_keys` and `_facts`, and others in lower case, are modules of functions.
"""

from __future__ import annotations

from mpguard import document as document
from mpguard import targets as targets
from mpguard.core import settings as settings
from mpguard.core import tracked_fs as tracked_fs
from mpguard.core.errors import ConfigError as ConfigError
from mpguard.core.errors import MpguardError as MpguardError
from mpguard.core.errors import PolicyError as PolicyError
from mpguard.core.errors import did_you_mean as did_you_mean
from mpguard.core.lazy_pattern import lazy_pattern as lazy_pattern
from mpguard.core.text_edits import Edit as Edit
from mpguard.core.text_edits import Span as Span
from mpguard.document import Document as Document
from mpguard.document import Entry as Entry
from mpguard.document import deepspeed_file as deepspeed_file
from mpguard.document import dialects as dialects
from mpguard.document import mp_yaml as mp_yaml
from mpguard.document import validation as validation
from mpguard.document.newer import may_be_new as may_be_new
from mpguard.document.schemas import accelerate, axolotl, deepspeed, llamafactory, megatron_bridge, nemo
from mpguard.document.values import misspelling_of as misspelling_of
from mpguard.lint import reachability as reachability
from mpguard.lint.configs import accelerate_config as accelerate_config
from mpguard.lint.configs import config_edits as config_edits
from mpguard.lint.configs import launch_expectations as launch_expectations
from mpguard.lint.facts.behaviour import accelerate_precision as accelerate_precision
from mpguard.lint.facts.behaviour import autocast_ops as autocast_ops
from mpguard.lint.facts.behaviour import lightning as lightning
from mpguard.lint.facts.behaviour import trace_steps
from mpguard.lint.facts.behaviour.events import Event as Event
from mpguard.lint.facts.behaviour.events import EventKind as EventKind
from mpguard.lint.facts.behaviour.events import is_optimizer as is_optimizer
from mpguard.lint.facts.behaviour.events.compile import launched_compiled as launched_compiled
from mpguard.lint.facts.behaviour.options import Option as Option
from mpguard.lint.facts.behaviour.options import can_be_chosen as can_be_chosen
from mpguard.lint.facts.behaviour.options import is_default as is_default
from mpguard.lint.facts.behaviour.regions import Region as Region
from mpguard.lint.facts.behaviour.regions import enabled_argument as enabled_argument
from mpguard.lint.facts.behaviour.scalars import ScalarUse as ScalarUse
from mpguard.lint.facts.behaviour.trace_steps import StepKind as StepKind
from mpguard.lint.facts.behaviour.trace_steps import Trace as Trace
from mpguard.lint.facts.behaviour.trace_steps import TraceStep as TraceStep
from mpguard.lint.facts.domain import adapters as adapters
from mpguard.lint.facts.domain import autocast_cache as autocast_cache
from mpguard.lint.facts.domain import backends as backends
from mpguard.lint.facts.domain import bridge_configs as bridge_configs
from mpguard.lint.facts.domain import fp8
from mpguard.lint.facts.domain import input_casts as input_casts
from mpguard.lint.facts.domain import own_optimizers as own_optimizers
from mpguard.lint.facts.domain import unscaled_steps as unscaled_steps
from mpguard.lint.facts.domain import wrappers as wrappers
from mpguard.lint.facts.domain.compiled_functions import compiled_scopes as compiled_scopes
from mpguard.lint.facts.domain.fp8 import Layer as Layer
from mpguard.lint.facts.domain.fp8 import is_never_switched_on as is_never_switched_on
from mpguard.lint.facts.domain.scaler_dtype import bfloat16_region as bfloat16_region
from mpguard.lint.facts.domain.scaler_dtype import computes_without_float16 as computes_without_float16
from mpguard.lint.facts.domain.scaler_dtype import scales_without_need as scales_without_need
from mpguard.lint.facts.domain.training import Weights as Weights
from mpguard.lint.facts.domain.wrappers import Wrap as Wrap
from mpguard.lint.facts.domain.wrappers import WrapperSettings as WrapperSettings
from mpguard.lint.facts.file import Facts as Facts
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program import keywords as keywords
from mpguard.lint.facts.program import roles as roles
from mpguard.lint.facts.program.dtypes import OtherDtype as OtherDtype
from mpguard.lint.facts.program.dtypes import PossibleDtypes as PossibleDtypes
from mpguard.lint.facts.program.lattice import Constant as Constant
from mpguard.lint.facts.program.lattice import DtypeValue as DtypeValue
from mpguard.lint.facts.program.lattice import Function as Function
from mpguard.lint.facts.program.lattice import Method as Method
from mpguard.lint.facts.program.lattice import Object as Object
from mpguard.lint.facts.program.lattice import Ref as Ref
from mpguard.lint.facts.program.option_values import destination as destination
from mpguard.lint.facts.program.option_values import option_defaults as option_defaults
from mpguard.lint.facts.program.option_values import option_names as option_names
from mpguard.lint.facts.syntax import imports as imports
from mpguard.lint.facts.syntax.dtype_triggers import CASTS_LOW_PRECISION as CASTS_LOW_PRECISION
from mpguard.lint.facts.syntax.dtype_triggers import MENTIONS_FP16 as MENTIONS_FP16
from mpguard.lint.facts.syntax.dtype_triggers import MENTIONS_LOW_PRECISION as MENTIONS_LOW_PRECISION
from mpguard.lint.facts.syntax.dtype_triggers import NAMES_HALF as NAMES_HALF
from mpguard.lint.facts.syntax.nodes import constant as constant
from mpguard.lint.facts.syntax.nodes import dotted as dotted
from mpguard.lint.facts.syntax.nodes import text_of as text_of
from mpguard.lint.facts.syntax.path_condition import All as All
from mpguard.lint.facts.syntax.path_condition import Any as Any
from mpguard.lint.facts.syntax.path_condition import Condition as Condition
from mpguard.lint.facts.syntax.path_condition import Flag as Flag
from mpguard.lint.facts.syntax.path_condition import PathCondition as PathCondition
from mpguard.lint.facts.syntax.path_condition import compatible as compatible
from mpguard.lint.facts.syntax.path_condition import implies as implies
from mpguard.lint.facts.syntax.path_condition import negated as negated
from mpguard.lint.facts.syntax.records import Binding as Binding
from mpguard.lint.facts.syntax.records import Call as Call
from mpguard.lint.facts.syntax.records import Record as Record
from mpguard.lint.facts.syntax.records import Scope as Scope
from mpguard.lint.facts.syntax.records import Use as Use
from mpguard.lint.facts.syntax.records import With as With
from mpguard.lint.facts.syntax.view import aliases as aliases
from mpguard.lint.facts.syntax.view import called as called
from mpguard.lint.model import python_edits as python_edits
from mpguard.lint.model.rule import Bad as Bad
from mpguard.lint.model.rule import ConfigRule as ConfigRule
from mpguard.lint.model.rule import Diagnostic as Diagnostic
from mpguard.lint.model.rule import EngineRule as EngineRule
from mpguard.lint.model.rule import Fix as Fix
from mpguard.lint.model.rule import Good as Good
from mpguard.lint.model.rule import HasSpan as HasSpan
from mpguard.lint.model.rule import LaunchRule as LaunchRule
from mpguard.lint.model.rule import Note as Note
from mpguard.lint.model.rule import Rule as Rule
from mpguard.lint.model.rule import ScalingRule as ScalingRule
from mpguard.lint.model.rule import any_of as any_of
from mpguard.lint.project import siblings as siblings
from mpguard.lint.project.launch_configs import LaunchConfig as LaunchConfig
from mpguard.lint.project.launch_lines import Launch as Launch
from mpguard.lint.project.launch_lines import Word as Word
from mpguard.policy import recipes as recipes
from mpguard.policy.dtype import HALF_DTYPES as HALF_DTYPES
from mpguard.policy.dtype import Dtype as Dtype
from mpguard.policy.hardware import NEEDS as NEEDS
from mpguard.policy.hardware import Hardware as Hardware
from mpguard.policy.hardware import named as named
from mpguard.policy.policy import FIELD_NAMES as FIELD_NAMES
from mpguard.policy.policy import Policy as Policy
from mpguard.targets import capabilities as capabilities
from mpguard.targets.inject import Change as Change
from mpguard.targets.settings import ABSENT as ABSENT
from mpguard.targets.settings import show as show

accelerate_keys, axolotl_keys, deepspeed_keys, llamafactory_keys = accelerate, axolotl, deepspeed, llamafactory
megatron_bridge_keys, nemo_keys = megatron_bridge, nemo
fp8_facts, library_names, trace_facts = fp8, api_names, trace_steps
