"""The dtypes of torch in the facts: those that a policy can name, as `Dtype`, and the others."""

from __future__ import annotations

from enum import Enum

from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.policy.dtype import Dtype


class OtherDtype(Enum):
    """A dtype of torch that no policy can name: integers, booleans, and the FP8 formats of AMD."""

    E4M3_FNUZ = "float8_e4m3fnuz"
    E5M2_FNUZ = "float8_e5m2fnuz"
    INT64 = "int64"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def torch_name(self) -> str:
        """The attribute of `torch`, such as `int64`."""
        return self.value


AnyDtype = Dtype | OtherDtype
#: The dtypes that an expression may have, each with its path condition; None for one that is unknown.
PossibleDtypes = tuple[tuple[PathCondition, AnyDtype | None], ...]


def as_dtype(dtype: AnyDtype | str) -> AnyDtype:
    """Return a dtype that a rule names: a member, or any spelling that `Dtype.parse` accepts."""
    return Dtype.parse(dtype) if isinstance(dtype, str) else dtype


def only_dtype(dtypes: PossibleDtypes) -> AnyDtype | None:
    """Return the dtype if it is the same under every path condition; None if it differs or is unknown."""
    found = {dtype for _, dtype in dtypes}
    return found.pop() if len(found) == 1 else None


def guards_of(dtype: AnyDtype | str, dtypes: PossibleDtypes, guard: PathCondition) -> list[PathCondition]:
    """Return the path conditions under which one of several dtypes is `dtype`, each joined with `guard`."""
    wanted = as_dtype(dtype)
    return [both for own, each in dtypes if each is wanted and (both := guard.joined(own)).possible]
