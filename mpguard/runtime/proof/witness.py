"""Identities that hold exactly only where values were rounded: the witnesses that may end a run.

Each compares the samples of one tensor at two times: what was left (by a backward pass, or a step), and what was found
(by the next pass, the reduction, or the step). See "The law of the witness" in docs/architecture.md. Values in FP32 are
compared, not bits: NaN equals NaN, and -0 equals 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: How many different values rounding must have changed: fewer may be equal by chance.
LEAST = 8

#: The dtypes with 16 bits, by name, with the bits of an FP32 mantissa that they do not have.
NARROW = {"bf16": 16, "fp16": 13}

#: Other ways than to the nearest value: a mask over the bits, and stochastic rounding.
CUT_OFF, EITHER = " towards zero", ", up or down"

#: A multiplication by one factor whose results are in 16 bits.
PRODUCT = " in a multiplication"

#: Neighbours in FP32 of a factor, or a scale, that was computed from one element.
NEIGHBOURS = 2

#: Grids: the least number of levels that a row must lie on, the largest level, and how many elements a group has.
LEVELS, LARGEST_LEVEL, GROUPS = 4, 255, (64, 32, 16)

#: The least scale of a loss for which a division by it is known: smaller powers of two divide gradients otherwise, too.
LEAST_SCALE = 4096.0


@dataclasses.dataclass(frozen=True)
class Match:
    """An identity that holds for all values of a sample.

    to: the dtype or grid that the values were rounded to. factor: by which they were multiplied after that. changed:
    how many of them rounding has changed. sampled: their number. number: one of them, before and after.
    """

    to: str
    factor: float
    changed: int
    sampled: int
    number: int
    before: float
    after: float


def describe(to: str) -> str:
    """Return in words what happened to values. to: as in `Match`."""
    if is_division(to):
        return f"divided twice by the loss scale ({to.removeprefix('1/')}),"
    return f"put on {to}" if to.startswith("a grid") else f"rounded to {to}"


def is_division(to: str) -> bool:
    """True if values were divided by the loss scale. to: as in `Match`."""
    return to.startswith("1/")


def is_allowed(to: str, bits: int) -> bool:
    """True if values may be rounded so where a dtype of so many bits is asked for."""
    return to.startswith(tuple(NARROW)) and bits <= 16


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if all values are equal; NaN equals NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def rounded(left: torch.Tensor, found: torch.Tensor) -> Match | None:
    """Return a match if `found` is `left` rounded to 16 bits, and then multiplied by one factor or not.

    Rounded to the nearest value, towards zero, or, without a factor, to one of the two values around each; or rounded
    again after the multiplication.
    """
    if not _are_alike(left, found, 1) or factors(left, found):
        return None
    for name in NARROW:
        below = _cut_off(left, name)
        match = (
            _narrowed(name, left, _to(left, name), found)
            or _narrowed(name + CUT_OFF, left, below, found)
            or _rounded_to_either(name, left, below, found)
            or _multiplied_in(name, left, found)
        )
        if match is not None:
            return match
    return None


def summed(terms: Sequence[torch.Tensor], found: torch.Tensor) -> Match | None:
    """Return a match if `found` is the sum of gradients in 16 bits, added up in their order, and not that in FP32."""
    exact = terms[0].clone()
    for term in terms[1:]:
        exact += term
    if not _are_alike(exact, found, len(terms)) or factors(exact, found):
        return None
    for name in NARROW:
        for narrow in _sums(terms, exact, name):
            match = _narrowed(name, exact, narrow, found)
            if match is not None:
                return match
    return None


def _are_alike(exact: torch.Tensor, found: torch.Tensor, terms: int) -> bool:
    """Return False if no rounding to 16 bits explains a difference. To save time: it decides nothing else."""
    one, other = exact.double().nan_to_num(0.0, 0.0, 0.0), found.double().nan_to_num(0.0, 0.0, 0.0)
    length = float(one @ one)
    factor = float(one @ other) / length if length else 0.0
    return float((other - factor * one).abs().max()) <= 2.0**-6 * terms * abs(factor) * float(one.abs().max())


def _sums(terms: Sequence[torch.Tensor], exact: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """Yield what sums and means are in a narrow dtype.

    Of terms that were rounded and of exact ones, rounded after each addition, at the end, or not again.
    """
    for rounds_terms in (True, False):
        wide = exact
        total = _to(terms[0], name)
        if rounds_terms:
            wide = _to(terms[0], name)
        for term in terms[1:]:
            added = _to(term, name) if rounds_terms else term
            total = _to(total + added, name)
            wide = wide + added if rounds_terms else wide
        yield from (total, wide, _to(wide, name)) if rounds_terms else (total, _to(wide, name))
        if len(terms) > 1:
            yield from (_to(total / len(terms), name), _to(wide / len(terms), name))


def _narrowed(name: str, exact: torch.Tensor, narrow: torch.Tensor, found: torch.Tensor) -> Match | None:
    """Return a match if values that were found are those in a narrow dtype, up to one factor."""
    changed = (narrow != exact) & exact.isfinite() & narrow.isfinite()
    if int(changed.sum()) < LEAST or _different(exact[changed]) < LEAST:
        return None
    factor = 1.0 if same(found, narrow) else next(iter(sorted(factors(narrow, found))), None)
    return None if factor is None else _match(name, factor, changed, exact, found)


def _rounded_to_either(name: str, left: torch.Tensor, below: torch.Tensor, found: torch.Tensor) -> Match | None:
    """Return a match if each value became one of the two in a narrow dtype around it, as stochastic rounding does.

    below: the one that is nearer to zero.
    """
    import torch

    step = (below != left).to(torch.int32) << NARROW[name]
    above = (below.view(torch.int32) + step).view(torch.float32)
    changed = (found != left) & left.isfinite() & found.isfinite()
    enough = min(int(changed.sum()), _different(left[changed]), _different(found[changed])) >= LEAST
    fits = (found == below) | (found == above) | (found.isnan() & left.isnan())
    return _match(name + EITHER, 1.0, changed, left, found) if enough and bool(fits.all()) else None


def _multiplied_in(name: str, left: torch.Tensor, found: torch.Tensor) -> Match | None:
    """Return a match if `found` is `left`, rounded or not, times one factor with the results in a narrow dtype."""
    if not same(_to(found, name), found):
        return None
    for source in (left, _to(left, name)):
        for factor in _factors_in(name, source, found):
            product = (source.double() * factor).float()
            changed = (product != found) & left.isfinite() & found.isfinite()
            enough = int(changed.sum()) >= LEAST and _different(found[changed]) >= LEAST
            if enough and same(_to(product, name), found):
                return _match(name + PRODUCT, factor, changed, left, found)
    return None


def _factors_in(name: str, values: torch.Tensor, found: torch.Tensor) -> Iterator[float]:
    """Yield a factor with which all `values` round to what was found, in as few bits as it may have; none if none does.

    Each value bounds it: its product is nearer to what was found than to the neighbours of that in the narrow dtype. A
    power of two is none, because it rounds nothing.
    """
    import torch

    used = (values != 0) & (found != 0) & values.isfinite() & found.isfinite()
    if not bool(used.any()):
        return
    narrow = found[used].abs().to(torch.bfloat16 if name == "bf16" else torch.float16)
    exact, bits = narrow.double(), narrow.view(torch.int16)
    below, above = ((bits + step).view(narrow.dtype).double() for step in (-1, 1))
    ratio = values[used].double() * found[used].sign().double()
    least = float(((exact + below) / 2 / ratio.abs()).max())
    most = float(((exact + above) / 2 / ratio.abs()).min())
    one_sign = bool((ratio > 0).all()) or bool((ratio < 0).all())
    if one_sign and 0 < least <= most and math.frexp(least)[1] == math.frexp(most)[1] and math.frexp(least)[0] > 0.5:
        middle = torch.tensor((least + most) / 2 * (1 if float(ratio[0]) > 0 else -1), dtype=torch.float64)
        yield from dict.fromkeys((float(_to(middle, name)), float(middle.float()), float(middle)))


def _match(to: str, factor: float, changed: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Match:
    number = int((changed * before.abs().nan_to_num()).argmax())
    return Match(
        to, factor, int(changed.sum()), before.numel(), number, float(before[number]), float(after[number])
    )  # fmt: skip


def factors(values: torch.Tensor, found: torch.Tensor) -> set[float]:
    """Return the factors in FP32 with which `found` is exactly `values` multiplied, or divided by one."""
    import torch

    magnitude = values.abs().nan_to_num(0.0, 0.0, 0.0)
    number = int(magnitude.argmax()) if values.numel() else 0
    if not values.numel() or not float(magnitude[number]) or not float(found[number]):
        return set()
    multiplied = _neighbours(found[number] / values[number])
    divided = _neighbours(values[number] / found[number])
    fits = ((values * multiplied == found) | (values.isnan() & found.isnan())).all(1)
    fits_divided = ((values / divided == found) | (values.isnan() & found.isnan())).all(1)
    known = [*multiplied[fits].flatten().tolist(), *(1 / divided[fits_divided].flatten().double()).tolist()]
    return {factor for factor in known if torch.isfinite(torch.tensor(factor))}


def _neighbours(value: torch.Tensor) -> torch.Tensor:
    """Return a value in FP32 and its neighbours, as a column."""
    import torch

    bits = value.reshape(1).view(torch.int32) + torch.arange(-NEIGHBOURS, NEIGHBOURS + 1, dtype=torch.int32)
    return bits.view(torch.float32)[:, None]


def divided(left: torch.Tensor, found: torch.Tensor, scale: float) -> Match | None:
    """Return a match if `found` is `left` divided by a loss scale."""
    changed = (found != left) & left.isfinite()
    if scale < LEAST_SCALE or int(changed.sum()) < LEAST or _different(left[changed]) < LEAST:
        return None
    if not same(found, left / scale) and not same(found, left * (1 / scale)):
        return None
    return _match(f"1/{scale:g}", 1 / scale, changed, left, found)


def on_grid(left: torch.Tensor, found: torch.Tensor, row: slice) -> Match | None:
    """Return a match if the values of a row were put on a grid: on the nearest multiples of one scale, or of FP8.

    A whole row may have the scale, or a group of 64, 32 or 16 of its elements; of FP8 a whole row. row: which values
    are of one row.
    """
    left, found = left[row], found[row]
    for size in dict.fromkeys(min(group, found.numel()) for group in GROUPS):
        match = _group_on_grid(left[:size], found[:size]) if size >= GROUPS[-1] else None
        if match is not None:
            return dataclasses.replace(match, number=row.start + match.number)
    match = _row_in_fp8(left, found) if found.numel() >= GROUPS[-1] else None
    return None if match is None else dataclasses.replace(match, number=row.start + match.number)


def _row_in_fp8(left: torch.Tensor, found: torch.Tensor) -> Match | None:
    """Return a match if a row was rounded to FP8 with one scale: all values are that scale times numbers of FP8.

    These have 8 significands (E4M3), or 4 (E5M2). Blocks whose scales are powers of two are such a row, too.
    """
    import torch

    changed = found != left
    if int(changed.sum()) < LEAST or _different(left[changed]) < LEAST or not bool(torch.isfinite(found).all()):
        return None
    size = found.abs()
    significands = torch.tensor(sorted(set(torch.frexp(size[size > 0]).mantissa.tolist())))
    for first in (8, 4):
        levels = torch.arange(first, 2 * first, dtype=torch.float32)
        if not LEVELS <= len(significands) <= first or not _are_scaled(significands, levels):
            continue
        # Half a step is 1/16, or 1/8, of a number at most; the smallest ones are multiples of one step.
        nearest = (left - found).abs() <= (size / (1.99 * first)).clamp(min=float(size[size > 0].min()) * 0.50001)
        if bool(nearest.all()):
            return _match("a grid of fp8", 1.0, changed, left, found)
    return None


def _are_scaled(significands: torch.Tensor, levels: torch.Tensor) -> bool:
    """True if numbers are whole levels times one scale, or divided by one, apart from powers of two."""
    import torch

    for level in levels:
        for scales, inverse in ((significands[0] / level, False), (level / significands[0], True)):
            scale = _neighbours(scales)
            exact = torch.frexp(levels / scale if inverse else levels * scale).mantissa
            if any(bool(torch.isin(significands, each).all()) for each in exact):
                return True
    return False


def _group_on_grid(left: torch.Tensor, found: torch.Tensor) -> Match | None:
    import torch

    changed = found != left
    if int(changed.sum()) < LEAST or _different(left[changed]) < LEAST or not bool(torch.isfinite(found).all()):
        return None
    exact = found.double()
    nonzero = exact.abs()[exact != 0]
    if not nonzero.numel():
        return None
    # The smallest value is a small multiple of the scale: with each, the others are whole multiples, or not.
    steps = nonzero.min() / torch.arange(1, 17, dtype=torch.float64)[:, None]
    levels = (exact / steps).round()
    fits = ((levels * steps - exact).abs() <= exact.abs() * 2.0**-20).all(1) & (levels.abs().amax(1) <= LARGEST_LEVEL)
    for number in fits.nonzero().flatten().tolist():
        level = levels[number]
        largest = int(level.abs().argmax())
        scales = _neighbours((exact[largest] / level[largest]).float())
        for scale in scales[(level.float() * scales == found).all(1)].flatten().tolist():
            nearest = bool(((left.double() - exact).abs() <= scale * 0.50001).all())
            if nearest and _different(level) >= LEVELS:
                kind = "int4" if float(level.abs().max()) <= 8 else "int8"
                return _match(f"a grid of {kind}", 1.0, changed, left, found)
    return None


def _different(values: torch.Tensor) -> int:
    return len(set(values.tolist()))


def _to(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return values in FP32 after they were rounded to a dtype."""
    import torch

    return values.to(torch.bfloat16 if name == "bf16" else torch.float16).to(torch.float32)


def _cut_off(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return values in FP32 without the bits that a dtype does not have: rounded towards zero."""
    import torch

    return (values.view(torch.int32) >> NARROW[name] << NARROW[name]).view(torch.float32)
