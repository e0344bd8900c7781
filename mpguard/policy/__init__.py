"""The precision of a run: `Policy`, the dtypes, the named recipes, and what hardware can run."""

from mpguard.policy.dtype import Dtype
from mpguard.policy.fp8_modules import Fp8Recipe, ModuleRecipe
from mpguard.policy.policy import (
    BACKENDS,
    DEFAULT_FP8_EXCLUDE,
    FIELD_NAMES,
    Backend,
    Fp8Format,
    Policy,
)

__all__ = [
    "BACKENDS",
    "DEFAULT_FP8_EXCLUDE",
    "FIELD_NAMES",
    "Backend",
    "Dtype",
    "Fp8Format",
    "Fp8Recipe",
    "ModuleRecipe",
    "Policy",
]
