from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Dtype, Facts, Note, Rule, any_of, dtype_triggers, python_edits


class Float32LimitsOnHalf(Rule, form_of="MPG601"):
    """`torch.finfo(torch.float32).min` or `.max` is put into an FP16 or BF16 tensor.

    The limit is larger than the largest FP16 (65504) and the largest BF16 (3.39e38, against float32's 3.40e38).
    `masked_fill`, `full` and `clamp` raise "value cannot be converted ... without overflow"; `where`, indexed
    assignment and arithmetic give `-inf`, and a fully masked row gives NaN after its softmax (torch 2.13, both dtypes).

    Tensors of unknown dtype are not reported: `torch.full((n, n), torch.finfo(torch.float32).min)` is an FP32 tensor,
    and its later uses are not followed through unknown functions.
    """

    message = "{number} is beyond {dtype}: {effect}"
    help = "use `torch.finfo` of the tensor's own dtype"
    triggers = (
        any_of(b"finfo"),
        any_of(b"float32", b"float64", b"torch.float)", b"torch.double", b"np.float"),
        any_of(*dtype_triggers.MENTIONS_LOW_PRECISION),
        any_of(b".min", b".max"),
    )
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for use in facts.scalars.uses:
            if use.number.limit_of not in (Dtype.FP32, Dtype.FP64) or abs(use.number.value) < 1e38:
                continue
            found = facts.precision.low(use.tensor, use.record)
            if found is None:
                continue
            dtype = found.label
            cause = f"autocast computes it in {dtype} here" if found.by_autocast else f"it is {dtype} from here"
            yield self.at(
                use,
                number=f"`{facts.short(use.node)}`",
                dtype=dtype,
                effect=f"`{use.name}` raises" if use.how == "raises" else "it becomes infinite",
                notes=(Note(cause, found.origin.span),) if found.origin is not None else (),
                fix=python_edits.limit_of_own_dtype(use, found, facts),
            )
