"""The precision of a run: `Policy`, the dtypes, the named recipes, and what hardware can run."""

from mpguard.policy.dtype import Dtype
from mpguard.policy.fp8_modules import BACKWARD_HIGH, NONE, Fp8Recipe, ModuleRecipe, entry_for
from mpguard.policy.policy import (
    BACKENDS,
    DEFAULT_FP8_EXCLUDE,
    EMULATED,
    FIELD_NAMES,
    FLOAT8_LINEAR,
    Backend,
    Fp8Format,
    Policy,
)

__all__ = [
    "BACKENDS",
    "BACKWARD_HIGH",
    "DEFAULT_FP8_EXCLUDE",
    "EMULATED",
    "FIELD_NAMES",
    "FLOAT8_LINEAR",
    "NONE",
    "Backend",
    "Dtype",
    "Fp8Format",
    "Fp8Recipe",
    "ModuleRecipe",
    "Policy",
    "entry_for",
]
