"""The identities that end a run: they hold where values were rounded, and never else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch

from mpguard.runtime.proof import samples, witness

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def values(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "after",
    [
        lambda each: each,
        lambda each: each * 0.29,
        lambda each: each / torch.tensor(77.7),
        lambda each: each * 2.0**-16,
        lambda each: each * -1.0,
    ],
    ids=["alone", "times", "divided", "power", "negative"],
)
def test_values_that_were_rounded_and_scaled(name: str, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for seed in range(20):
        left = values(seed)
        match = witness.rounded(left, after(left.to(DTYPES[name]).float()))
        assert match is not None and match.to == name and match.changed >= witness.LEAST
        assert float(left[match.number]) == match.before


def masked(left: torch.Tensor, bits: int, offset: int = 0) -> torch.Tensor:
    """Return values without the last bits. offset: what is added to all bits before, at random up to it."""
    draw = torch.randint(0, offset + 1, left.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return ((left.view(torch.int32) + draw) >> bits << bits).view(torch.float32)


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp16", 13)])
def test_values_that_a_mask_cuts_off_or_that_were_rounded_stochastically(name: str, bits: int) -> None:
    for seed in range(20):
        left = values(seed)
        for after in (lambda each: each, lambda each: each * 0.29):
            match = witness.rounded(left, after(masked(left, bits)))
            assert match is not None and match.to == f"{name} towards zero" and witness.is_allowed(match.to, 16)
        match = witness.rounded(left, masked(left, bits, (1 << bits) - 1))
        assert (
            match is not None and match.to == f"{name}, up or down" and witness.describe(match.to).startswith("round")
        )
        exact = values(seed).bfloat16().float()
        assert witness.rounded(exact, exact.clamp(-1, 1)) is None


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("factor", [0.29, -3.1, 0.9, 1e-2])
def test_a_multiplication_whose_results_are_in_16_bits(name: str, factor: float) -> None:
    narrow = DTYPES[name]
    for seed in range(20):
        for left in (values(seed), values(seed).to(narrow).float()):  # in the matmuls of autocast they are exact
            for product in (
                left.to(narrow) * factor,
                left.to(narrow) * torch.tensor(factor, dtype=narrow),
                (left * factor).to(narrow),
            ):
                match = witness.rounded(left, product.float())
                assert match is not None and match.to.startswith(name) and witness.is_allowed(match.to, 16)
        exact = values(seed).to(narrow).float()
        assert witness.rounded(exact, exact * 0.25) is None and witness.rounded(exact, exact * factor) is None


@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        lambda left: masked(left, 8),
        lambda left: left.round(decimals=2),
        lambda left: torch.where(left.abs() < 1e-2, masked(left, 16), left * 1.001),
        lambda left: left * 0.29,
        lambda left: left / 3,
        lambda left: left.clamp(-0.5, 0.5),
        lambda left: left + 1e-3,
        torch.zeros_like,
        lambda left: left.flip(0),
        lambda left: left.sign() * 0.01,
        lambda left: values(99).bfloat16().float(),
        lambda left: left.double().mul(0.1).float(),
        lambda left: torch.where(left > 0, left.bfloat16().float(), left),
        lambda left: left * torch.nan,
        lambda left: (left * 0.3).bfloat16().float() + left,
        lambda left: left.sign() * 2.0**-7,
        lambda left: (left + 0.01 * left.flip(0)).bfloat16().float(),
    ],
)
def test_other_changes_are_no_rounding(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for seed in range(20):
        left = values(seed)
        assert witness.rounded(left, change(left)) is None
        assert witness.on_grid(left, change(left), slice(64, 128)) is None


def test_values_that_rounding_does_not_change_prove_nothing() -> None:
    exact = values(0).bfloat16().float()
    assert witness.rounded(exact, exact) is None and witness.rounded(exact, exact * 0.3) is None
    few = exact.clone()
    few[:7] = values(1)[:7]
    assert witness.rounded(few, few.bfloat16().float()) is None, "seven changed values"
    one = torch.full((128,), 0.1)
    assert witness.rounded(one, one.bfloat16().float()) is None, "one value that all have"
    constant = torch.tensor([0.1, 0.3]).repeat(64)
    assert witness.rounded(constant, constant.bfloat16().float()) is None, "two values"


def test_nan_and_negative_zero_are_compared_as_values() -> None:
    left = values(0)
    left[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    found = left.bfloat16().float()
    found[1] = 0.0
    assert witness.same(left, left.clone()) and witness.rounded(left, found) is not None
    assert witness.same(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize("name", DTYPES)
def test_sums_are_added_up_again_in_their_order(name: str) -> None:
    dtype = DTYPES[name]
    for seed in range(5):
        terms = [values(10 * seed + number) for number in range(5)]
        total, exact_terms = torch.zeros(128, dtype=dtype), torch.zeros(128, dtype=dtype)
        for term in terms:
            total += term.to(dtype)
            exact_terms += term
        cast = [term.to(dtype) for term in terms]
        wrong = [
            total.float(), total.float() * 0.37, exact_terms.float() / 5, (total / 5).float(),
            torch.stack(cast).mean(0).float(), sum(each.float() for each in cast), sum(terms).to(dtype).float(),
        ]  # fmt: skip
        for found in wrong:
            match = witness.summed(terms, found)  # type: ignore[arg-type]
            assert match is not None and match.to == name
        first, second, *_ = terms
        right = [
            sum(terms), sum(terms) / 5, sum(terms) * 0.37, torch.stack(terms).mean(0), terms[-1], first * 0.4 + second,
            sum(terms[1:]), torch.stack(terms).sum(0).double().float(),
        ]  # fmt: skip
        assert not any(witness.summed(terms, found) for found in right)  # type: ignore[arg-type]


@pytest.mark.parametrize(("levels", "kind"), [(127, "int8"), (7, "int4"), (60, "int8")])
def test_rows_on_a_grid(levels: int, kind: str) -> None:
    for seed in range(20):
        row = values(seed)[:64]
        scale = row.abs().max() / levels
        match = witness.on_grid(row, (row / scale).round() * scale, slice(0, 64))
        assert match is not None and match.to == f"a grid of {kind}"
    groups = torch.cat([(part / part.abs().max() * 7).round() * (part.abs().max() / 7) for part in row.split(16)])
    assert witness.on_grid(row, groups, slice(0, 64)) is not None, "16 elements have a scale"
    assert witness.on_grid(row, row.round(decimals=1), slice(0, 12)) is None, "too few"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_in_fp8(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for seed in range(20):
        row = values(seed)[:64]
        scale = largest / row.abs().max() * 0.37  # the largest element of the tensor is in another row
        for found in ((row * scale).to(dtype).float() / scale, (row * scale).to(dtype).float() * (1 / scale)):
            match = witness.on_grid(row, found, slice(0, 64))
            assert match is not None and match.to == "a grid of fp8", seed
        assert witness.on_grid(row, row.to(dtype).float(), slice(0, 64)) is not None, "without a scale"
        blocks = torch.cat([(part * 2.0**n).to(dtype).float() / 2.0**n for n, part in enumerate(row.split(16))])
        assert witness.on_grid(row, blocks, slice(0, 64)) is not None, "scales that are powers of two"
        assert witness.on_grid(row, row.sign() * row.abs().mean(), slice(0, 64)) is None, "signs alone"
        assert witness.on_grid(row, row.roll(1).to(dtype).float(), slice(0, 64)) is None, "of other values"


def test_a_division_by_the_loss_scale() -> None:
    left = values(0, 1000)
    assert witness.divided(left, left / 65536, 65536.0) is not None
    assert witness.divided(left, left * (1 / 65536), 65536.0) is not None
    assert witness.divided(left, left / 65536, 32768.0) is None
    assert witness.divided(left, left / 8, 8.0) is None, "steps of accumulation, or ranks"


def test_samples_are_from_all_over_a_tensor() -> None:
    """A stride lies in one column of a vocabulary's matrix."""
    for rows, columns in ((50304, 16), (32000, 8), (64, 64)):
        index = samples.index_of((rows, columns), torch.device("cpu"))
        own = index.flat[: samples.VALUES]
        assert len(set((own % columns).tolist())) > columns // 2 and len(set((own // columns).tolist())) > 30
        row = index.flat[index.row]
        assert len(set((row // columns).tolist())) == 1 and len(row) == min(columns, samples.ROW)
    tensor = torch.randn(200, 300).T
    assert torch.equal(samples.sample(tensor), samples.sample(tensor.contiguous()))
    assert samples.sample(torch.zeros(())).shape == (1,) and samples.sample(torch.zeros(0)).shape == (0,)
    number = 70
    assert float(tensor[tuple(samples.place(tensor, number))]) == float(samples.sample(tensor)[number])


def test_samples_are_compared_by_device_and_dtype() -> None:
    own = [values(0), values(1).bfloat16(), values(2)]
    assert samples.are_equal(own, [each.clone() for each in own])
    assert not samples.are_equal(own, [own[0], own[1] + 1, own[2]])
    assert samples.are_set([torch.zeros(3), torch.ones(2), torch.full((2,), torch.nan)]) == [False, True, True]
