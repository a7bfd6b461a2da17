"""Gates: shortcuts that decide a value without all the runs of the full rule.

The full rule is `automatic.judge_floats` without gates: a lifted run, a native run, and the noise
of both measured by perturbed runs. Most values are decided sooner, and each way to do so is named
here, with its reason. A gate is *sound* if the full rule passes whatever it passes, and refuses
whatever it refuses; `tests/unit/numerics/test_gates.py` tests that. A gate that is not sound says
what it gives up, and for what.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.criterion import (
    MAX_Z,
    OWN_SHARE_SETTLED,
    RMS_Z,
    UNIT_F64,
    Noise,
    NoiseFloors,
    ScoreTotals,
    SumsOfSquares,
    as_reals,
    chunks,
    own_noise,
    real_view,
    rms,
    rms_difference,
    unit_roundoff,
)
from paritas.core.numerics.pooling import populations
from paritas.core.results.findings import Score, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.core.results.items import Item


# --- Gates of the rule itself ---------------------------------------------------------------------


class Gate(enum.Enum):
    """A way to pass in `judge_floats` without measuring the noise of that run.

    Attributes:
        SCALED_OWN_ERROR: of the lifted run. The noise is the reference's native error, scaled to
            float64, times 64. Not sound: a measured spread is multiplied by 8 only, and may be less
            than 8 times this. A fault is many orders of magnitude above either.
        OWN_ERROR: of the native run, once the lifted run has settled the meaning; see
            `own_error_score`.
        KNOWN_NOISE: of the native run. The noise is the reference's own error and the last bit of
            the dtype. Sound: a measured spread only adds to them.
        LEAST_SPREAD: of the native run. A lower bound of the spread, known without a run, replaces
            the spread. Sound, because more noise makes every z smaller, with one exception: where a
            perturbed run is not finite, and no lifted run has settled the meaning, the full rule
            uses the typical spread, which may be less.
    """

    SCALED_OWN_ERROR = enum.auto()
    OWN_ERROR = enum.auto()
    KNOWN_NOISE = enum.auto()
    LEAST_SPREAD = enum.auto()


ALL_GATES = frozenset(Gate)

# A candidate has lost no accuracy if its errors are within these multiples of the reference's own,
# in the worst element, in the mean square and in every slice.
OWN_MAX = 1.5
OWN_RMS = 1.25
OWN_SLICE = 2.0


def own_error_score(candidate: Tensor, reference: Tensor, arbiter: Tensor) -> Score:
    """The gate `OWN_ERROR`: a candidate no less accurate than the reference, like for like.

    Its errors to the arbiter may be 1.5 times the reference's own in the worst element, 1.25 times
    in the mean square, and twice in a slice. Errors count in multiples of the reference's in values
    of one population, so that a few large ones do not hide the others. Sound for the mean square of
    the whole tensor: noise is at least 0.8 times that, so z is at most 2.5, and no factor that all
    elements share is larger than the error. Not sound for single elements and slices: the full rule
    reports `degraded` if the worst errors of the two are at different elements, and both are more
    than four times the typical error. Nothing is lost there.
    """
    is_complex = candidate.is_complex() or arbiter.is_complex()
    candidate, arbiter, _ = as_reals(candidate, arbiter, Noise(unit=0.0))
    reference = real_view(reference)
    own_errors = own_noise(reference, arbiter).over_populations()
    noise = Noise(unit=unit_roundoff(reference.dtype), own=own_errors)
    floors = NoiseFloors.of(arbiter, dataclasses.replace(noise, own_share=1.0))
    totals = [
        ScoreTotals(arbiter.shape, arbiter.device, is_complex=is_complex, locates=is_candidate)
        for is_candidate in (True, False)
    ]
    for chunk_position, (r, c, e) in chunks(arbiter, candidate, reference):
        true = r.double()
        usual = floors.at(true, true.abs())
        errors = [(side.double() - true).abs_() / usual for side in (c, e)]
        sums = [SumsOfSquares.of(error) for error in errors]
        if not all(math.isfinite(side_sums.total) for side_sums in sums):
            finite = torch.isfinite(c) & torch.isfinite(e) & torch.isfinite(r)
            # An error where the reference has none is infinitely larger; equal values have none.
            errors = [
                torch.where(finite & (side != r), error, 0.0)
                for side, error in zip((c, e), errors, strict=True)
            ]
            sums = [SumsOfSquares.of(error) for error in errors]
        for total, error, error_sums in zip(totals, errors, sums, strict=True):
            total.add(chunk_position, error, error_sums)
    candidate_totals, reference_totals = totals
    figures: dict[str, Any] = {}
    slices = zip(candidate_totals.slices_on_host(), reference_totals.slices_on_host(), strict=True)
    for axis, (left, right) in enumerate(slices):
        if left is None or right is None or candidate_totals.count == 0:
            continue
        typical = (
            reference_totals.squares / candidate_totals.shape[axis] / 4
        )  # half the typical slice, squared
        ratios = (left / right.clamp(min=typical)).sqrt().nan_to_num(nan=0.0)
        top = int(ratios.argmax())
        if float(ratios[top]) > figures.get("slice_z", 0.0):
            figures = {"slice_axis": axis, "slice_index": top, "slice_z": float(ratios[top])}
            figures["slice_limit"] = OWN_SLICE
    # Few errors that are far larger than usual raise the mean square: up to this much.
    squares = min(
        reference_totals.squares,
        reference_totals.count * (RMS_Z * OWN_SHARE_SETTLED / OWN_RMS) ** 2,
    )
    return Score(
        max_z=ratio_to(candidate_totals.worst, reference_totals.worst),
        max_limit=OWN_MAX,
        rms_z=math.sqrt(ratio_to(candidate_totals.squares, squares)),
        rms_limit=OWN_RMS,
        index=candidate_totals.index,
        noise="the reference's own error, like for like",
        **figures,
    )


def ratio_to(error: float, scale: float) -> float:
    """An error as a multiple of another figure; infinite if only that is 0."""
    if error == 0:
        return 0.0
    return error / scale if scale else math.inf


# --- Few roundings, or far too many ---------------------------------------------------------------

# In float64 a difference of this many roundings of the value and of the typical value needs no
# measured noise: it is nine orders of magnitude below a fault of one in a million.
PLAIN_ROUNDINGS = 32.0
# The same for the native run, once the lifted run has settled the meaning.
NATIVE_ROUNDINGS = 4.0
# A difference in float64 is not rounding if it is this share of the typical value, and this many
# times the effect of perturbing the last bits of all arguments. It needs no measured noise either.
GROSS_SHARE = 1e-3
GROSS_SHAKES = 1e6


def near_in_float64(unsplit: Any, split: Any) -> bool:
    """The gate of a split's lifted run: both sides differ by a few roundings at most.

    Not sound: if float64 rounds less than that, as in a plain copy, the full rule is stricter. The
    gate gives up differences of 4e-15 of a value and of the typical value.
    """
    if not isinstance(unsplit, torch.Tensor) or not isinstance(split, torch.Tensor):
        return unsplit is None and split is None
    if unsplit.shape != split.shape or unsplit.dtype != split.dtype:
        return False
    if torch.equal(unsplit, split):
        return True
    if unsplit.dtype not in (torch.float64, torch.complex128) or not unsplit.numel():
        return False
    allowed = _roundings(unsplit, PLAIN_ROUNDINGS * UNIT_F64)
    return bool(((split - unsplit).abs() <= allowed).all())


def near_natively(reference: Any, candidate: Any, arbiter: Any) -> Status | None:
    """The gate of a split's native run, once the lifted run is settled; None if it does not decide.

    A value passes if every element is within four roundings of the arbiter, which the full rule
    allows if it knows only a dtype, or if its errors are as large as the reference's own, by
    `own_error_score`. Not sound if the measured noise is less than those roundings.
    """
    tensors = (reference, candidate, arbiter)
    if not all(isinstance(value, torch.Tensor) for value in tensors):
        return Status.IDENTICAL if reference is None and candidate is None else None
    if reference.shape != candidate.shape or reference.dtype != candidate.dtype:
        return None
    if torch.equal(reference, candidate):
        return Status.IDENTICAL
    if not is_inexact(reference) or arbiter.shape != reference.shape:
        return None
    candidate_error = (candidate - arbiter).abs()
    allowed = _roundings(arbiter, NATIVE_ROUNDINGS * unit_roundoff(reference.dtype))
    if bool((candidate_error <= allowed).all()):
        return Status.EQUIVALENT
    passes = own_error_score(candidate, reference, arbiter).passed
    return Status.EQUIVALENT if passes else None


def _roundings(truth: Tensor, share: float) -> Tensor:
    """This share of each value plus the typical value."""
    size = truth.abs()
    typical = populations(real_view(truth)).scale(size.double())
    return (size + typical).mul_(share)


def gross_difference(
    unsplit: Tensor, split: Tensor, limit: Callable[[], float | None]
) -> str | None:
    """The gate that refuses: why a difference in float64 cannot be rounding, or None.

    Sound if `limit` is a million times the rms spread of the lifted run: some element is off by
    that much, and its own spread is at most sqrt(n) times the rms of all. Not sound for an operator
    with a noise of a million times the effect of the perturbation that estimates it.

    Args:
        unsplit: the reference in float64, all of it finite.
        split: the candidate in float64.
        limit: returns the largest possible rounding, or None if unknown; called only if the
            difference is large enough.
    """
    difference, typical = rms_difference(split, unsplit), rms(unsplit)
    if not difference > GROSS_SHARE * typical:
        return None
    rounding = limit()
    if rounding is None or not difference > rounding:
        return None
    share = (
        f"{difference / typical:.2g} times the typical value" if typical else f"{difference:.3g}"
    )
    return f"in float64, where rounding is negligible, it is off by {share}"


# --- Noise learnt from earlier calls --------------------------------------------------------------

# Measured noise explains later errors up to this many times as large.
MARGIN = 1.5
# Errors above this many times the reference's own are measured again each time.
MOST_LEARNED = 64.0

# The worst and the rms of a difference in multiples of the whole, and its mean share of the values.
Sizes = tuple[float, float, float]


class LearntNoise:
    """The gate of a guard: a later call that differs by no more than earlier ones needs no runs.

    Distinguishing noise from a fault needs a float64 run, and sometimes perturbed runs, at many
    times the cost of the call. But the size of the noise, relative to the values or to the
    reference's own error, is a property of the program. Not sound: three figures of the whole
    tensor represent all elements and slices, and a later call may have less noise than the one that
    was judged. The worst and the rms follow the largest values; the third, the mean share that the
    difference has of each value, follows all of them, so that a few large ones do not hide the
    others. The gate gives up a fault that shows only in later calls and is at most 1.5 times what
    the full rule has passed before, by all three. It only passes values; it never fails one.
    """

    def __init__(self) -> None:
        self._differences: dict[Item, Sizes] = {}
        self._ratios: dict[Item, Sizes] = {}

    def learn(self, item: Item, difference: Sizes | None, ratios: Sizes | None) -> None:
        """Remember measured noise."""
        _grow_sizes(self._differences, item, difference)
        if ratios is not None and max(ratios) <= MOST_LEARNED:
            _grow_sizes(self._ratios, item, ratios)

    def explains_difference(self, item: Item, difference: Sizes | None) -> bool:
        """Whether the two sides differ by no more than before, relative to their values."""
        return _is_within_margin(difference, self._differences.get(item))

    def explains_errors(self, item: Item, ratios: Sizes | None) -> bool:
        """Whether the candidate's errors over the reference's own are no larger than before."""
        return _is_within_margin(ratios, self._ratios.get(item))


def _grow_sizes(table: dict[Item, Sizes], item: Item, sizes: Sizes | None) -> None:
    if sizes is not None:
        earlier_sizes = table.get(item, (0.0, 0.0, 0.0))
        worst, rms, share = map(max, earlier_sizes, sizes)
        table[item] = (worst, rms, share)


def _is_within_margin(sizes: Sizes | None, earlier_sizes: Sizes | None) -> bool:
    if sizes is None or earlier_sizes is None:
        return False
    return all(size <= MARGIN * most for size, most in zip(sizes, earlier_sizes, strict=True))


def relative_difference(candidate: Tensor, reference: Tensor) -> Sizes | None:
    """The worst and the rms difference in multiples of the reference's rms, and its mean share.

    Cheap enough for every call; None if something is not finite or the reference is all zero.
    """
    candidate, reference = real_view(candidate), real_view(reference)
    if not reference.numel():
        return None
    # In pieces, to save the memory of a whole difference; not on a device, which would have to
    # synchronize for each piece.
    full_pair = candidate, reference
    pieces = (pair for _, pair in chunks(*full_pair)) if reference.is_cpu else (full_pair,)
    parts = [difference_figures(c, r) for c, r in pieces]
    sizes, totals, shares, least, most = zip(*(map(float, part) for part in parts), strict=True)
    norms = math.hypot(*sizes), math.hypot(*totals)
    return relative_sizes(reference.numel(), *norms, sum(shares), min(least), max(most))


def difference_figures(candidate: Tensor, reference: Tensor) -> list[Tensor]:
    """The figures for `relative_sizes`, on the device of the tensors."""
    candidate, reference = real_view(candidate), real_view(reference)
    apart = candidate - reference
    norm = torch.linalg.vector_norm
    # In the dtype itself, unless it is half precision: only the ratio matters.
    dtype = torch.float32 if reference.dtype.itemsize == 2 else None  # noqa: PLR2004
    ends = torch.aminmax(apart)
    share = norm(shares_of_values(apart, reference), 1, dtype=dtype)
    return [norm(reference, dtype=dtype), norm(apart, dtype=dtype), share, *ends]


def shares_of_values(error: Tensor, truth: Tensor) -> Tensor:
    """|error| / (|error| + |truth|), element by element; 0 where both are 0."""
    size = error.abs()
    return size / (size + truth.abs()).add_(torch.finfo(error.dtype).tiny)


def relative_sizes(
    numel: int, size: float, total: float, share: float, least: float, most: float
) -> Sizes | None:
    """The relative difference, from its norm, the sum of its shares, and its extremes."""
    if not (math.isfinite(total) and math.isfinite(size) and size > 0):
        return None
    worst = max(abs(least), abs(most)) * math.sqrt(numel) / size
    return worst, total / size, share / numel


def error_ratios(candidate: Tensor, reference: Tensor, arbiter: Tensor) -> Sizes | None:
    """The candidate's errors over the reference's own: the worst, the rms, and the mean share.

    None if something is not finite, or if the reference has no error to compare with.
    """
    worst: list[float] = []
    total: list[float] = []
    shares: list[float] = []
    for side in (candidate, reference):
        largest, squares, share = 0.0, 0.0, 0.0
        for _, (side_piece, true) in chunks(real_view(side), real_view(arbiter)):
            error = side_piece.to(torch.float64) - true
            largest = max(largest, float(torch.linalg.vector_norm(error, math.inf)))
            squares += float(torch.linalg.vector_norm(error)) ** 2
            share += float(shares_of_values(error, true).sum())
        worst.append(largest)
        total.append(squares)
        shares.append(share)
    if not all(map(math.isfinite, total)) or total[1] == 0:
        return None
    return worst[0] / worst[1], math.sqrt(total[0] / total[1]), shares[0] / shares[1]


# --- Figures of the whole pair --------------------------------------------------------------------


def bound_score(
    max_abs: float,
    rmse: float,
    scale: float,
    noise: Noise,
    *,
    largest: float | None = None,
    numel: int | None = None,
    index: tuple[int, ...] | None = None,
) -> Score | None:
    """The gate of a comparison: a score that needs no other pass over the values, or None.

    Sound both ways, for noise of a dtype alone: every element's noise lies between that of a zero
    of the smallest population and that of the largest value. A largest difference within 2.5 of the
    least noise leaves no z above that; an rms difference beyond the limit for the most noise leaves
    the rms of z beyond it.

    Args:
        max_abs: the largest difference; all values must be finite or equal.
        rmse: the root mean square difference.
        scale: the typical value of the reference's smallest population.
        noise: must have no spread, own error or factor.
        largest: the largest absolute value of the reference; without it nothing is refused.
        numel: number of elements; without it the limit for very many applies.
        index: position of the largest difference.
    """
    rms_limit = RMS_Z if numel is None else RMS_Z * (1 + 2 / math.sqrt(numel))
    least = noise.relative * scale + noise.step
    most = math.inf
    if largest is not None:
        most = noise.step + (2 * noise.relative + noise.unit / 2) * largest
    if least > 0 and max_abs <= RMS_Z * least:
        divisor, word = least, "at most"
    elif most > 0 and rmse > rms_limit * most:
        divisor, word = most, "at least"
    else:
        return None
    return Score(
        max_z=max_abs / divisor,
        max_limit=MAX_Z,
        rms_z=rmse / divisor,
        rms_limit=rms_limit,
        index=index,
        noise=f"{noise.source}; {word} these",
    )


# --- Near enough, where it is not a verdict -------------------------------------------------------

# In float64, rounding is near 1e-15 of the largest value; faults are many orders above it.
CLOSE_F64 = 1e-9
# In a narrower dtype, this many units in the last place.
CLOSE_UNITS = 64


def agree(trial_result: Tensor, truth: Tensor, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, with NaN and infinities at equal positions.

    For trials of how an operator can be split. Not a gate: the full rule is stricter for values
    much smaller than the largest, and checks every split that is reported.

    Args:
        trial_result: the result of a trial.
        truth: the expected result.
        floor: an absolute difference that always counts as rounding.
    """
    if trial_result.shape != truth.shape or trial_result.dtype != truth.dtype:
        return False
    if not is_inexact(truth):
        return torch.equal(trial_result, truth)
    size = truth.abs().max().item() if truth.numel() else 0.0
    if not size < float("inf"):  # NaN, too
        finite = truth[truth.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
    wide = truth.dtype in (torch.float64, torch.complex128)
    near = (CLOSE_F64 if wide else CLOSE_UNITS * torch.finfo(truth.dtype).eps) * size + floor
    return torch.allclose(trial_result, truth, rtol=0.0, atol=near, equal_nan=True)


class Near:
    """Whether two values are equal up to rounding of a given size.

    For distinguishing patterns after the full rule has refused a value. Not a gate: the tolerance
    is far above noise and far below a fault.
    """

    def __init__(self, unit: float, floor: float = 0.0) -> None:
        """`floor` is added to the size of each value before `reach` applies."""
        self.unit = unit
        self.reach = unit**0.6
        self.floor = floor

    def __call__(self, value: Tensor, expected: Tensor, noise: float = 0.0) -> bool:
        """`noise` is an additional absolute tolerance."""
        if value.shape != expected.shape:
            return False
        if not value.numel():
            return True
        if not is_inexact(expected):
            return torch.equal(value, expected.to(value.dtype))
        value, expected = value.to(torch.float64), expected.to(torch.float64)
        size = expected.abs()
        typical = float(size.square().mean().sqrt())
        allowed = self.reach * (size + typical + self.floor) + noise
        difference = (value - expected).abs()
        # Equal infinities and NaNs are the same value.
        same = (value == expected) | (value.isnan() & expected.isnan())
        return bool((same | (difference <= allowed)).all())


def half_the_digits_agree(rel_l2: float, unit: float) -> bool:
    """Whether a difference may be rounding, if no noise can be measured.

    It passes nothing: a value that the rule refuses by its dtype alone becomes `unverified` instead
    of `different`.
    """
    return rel_l2 <= math.sqrt(unit)
