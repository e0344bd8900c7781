"""The dtypes of the facts: members, which torch has, and no text."""

from __future__ import annotations

import pytest
from lint_facts import facts_of

from mpguard.core.errors import PolicyError
from mpguard.lint import Dtype, dtypes, events
from mpguard.lint.facts.program.api_names import DTYPES
from mpguard.lint.facts.program.dtypes import as_dtype, only_dtype
from mpguard.lint.facts.syntax.path_condition import ALWAYS


def test_other_dtypes_are_torchs_and_none_of_a_policy() -> None:
    torch = pytest.importorskip("torch", reason="compares with torch")
    for dtype in dtypes.OtherDtype:
        assert str(getattr(torch, dtype.torch_name)) == f"torch.{dtype.torch_name}"
        assert Dtype.spelled(dtype.torch_name) is None or dtype.torch_name.endswith("fnuz"), "AMD's rows of a policy"


def test_the_names_of_torch_stand_for_its_dtypes() -> None:
    torch = pytest.importorskip("torch", reason="compares with torch")
    for path, dtype in DTYPES.items():
        if path.endswith("Tensor") or path == "torch.float8_e4m3":  # tensor types; a name that torch does not have
            continue
        assert str(getattr(torch, path.removeprefix("torch."))) == f"torch.{dtype.torch_name}", path


@pytest.mark.parametrize(
    ("kind", "code", "dtype"),
    [
        ("cast", "x.half()", Dtype.FP16),
        ("cast", "torch.Tensor.bfloat16(x)", Dtype.BF16),
        ("cast", "x.to(torch.long)", dtypes.OtherDtype.INT64),
        ("cast", "x.to(torch.float8_e4m3fnuz)", dtypes.OtherDtype.E4M3_FNUZ),
        ("cast", "x.type('torch.HalfTensor')", Dtype.FP16),
        ("autocast", "torch.autocast('cpu')", Dtype.BF16),
        ("load", "M.from_pretrained('x', torch_dtype='float16')", Dtype.FP16),
        ("load", "M.from_pretrained('x', torch_dtype=kind)", None),
        ("default_dtype", "torch.set_default_tensor_type('torch.cuda.HalfTensor')", Dtype.FP16),
        ("policy", "torch.distributed.fsdp.MixedPrecision(torch.bfloat16)", Dtype.BF16),
    ],
)
def test_events_hold_members(kind: events.EventKind, code: str, dtype: Dtype | dtypes.OtherDtype | None) -> None:
    (event,) = facts_of(f"import torch, torch.distributed.fsdp\n{code}\n").events(kind)
    assert only_dtype(event.dtypes) is dtype
    if dtype is not None:
        assert event.may_be(dtype) == [event.guard]


def test_a_rule_may_spell_a_dtype_and_an_unknown_spelling_is_an_error() -> None:
    (cast,) = facts_of("x.half()\n").events("cast")
    assert cast.may_be("float16") == cast.may_be("fp16") == cast.may_be(Dtype.FP16) == [cast.guard]
    assert cast.may_be("bf16") == []
    with pytest.raises(PolicyError, match="`flaot16` is not a dtype"):
        cast.may_be("flaot16")
    assert as_dtype(dtypes.OtherDtype.BOOL) is dtypes.OtherDtype.BOOL


def test_the_only_dtype() -> None:
    assert only_dtype(()) is None
    assert only_dtype(((ALWAYS, Dtype.FP16), (ALWAYS, Dtype.FP16))) is Dtype.FP16
    assert only_dtype(((ALWAYS, Dtype.FP16), (ALWAYS, None))) is None
