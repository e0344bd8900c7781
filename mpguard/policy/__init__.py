"""What a run must compute in: `Policy`, the dtypes, the named recipes, and what hardware can do."""

from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Backend, Policy

__all__ = ["Backend", "Dtype", "Policy"]
