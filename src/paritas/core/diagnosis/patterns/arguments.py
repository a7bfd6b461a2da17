"""What a function was computed of: the argument that gives the candidate's result.

A mistake before a function that can be undone (a sine, an exponential, a softmax, a norm) has no
name in the result, but one in the argument: a factor for each frequency, scores that are limited.
The argument follows from the result, up to what the function loses. Where it loses too much, both
programs are asked again with values for which it does not: angles of less than half a turn, a row
with a score of 0, values of an attention that show its weights.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import UNUSABLE, step_names
from paritas.core.diagnosis.case import Case, Context, roundoff, widen
from paritas.core.diagnosis.patterns.attention import (
    factor_of,
    is_attention,
    scores_of,
    weights_and_values,
)
from paritas.core.diagnosis.patterns.norms import NORMS, norm_of, with_norm
from paritas.core.diagnosis.patterns.operands import result_of
from paritas.core.diagnosis.patterns.predictions import Predictor
from paritas.core.numerics.random_tensors import HUGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.patterns.variations import Variation
    from paritas.core.diagnosis.place_runs import PlaceRuns

# Larger results are not undone.
_MOST_ELEMENTS = 1 << 20
# The rounding of a result, in units of the last place.
_ROUNDINGS = 4.0
# So many roundings are more than rounding.
_FAR = 8.0
# What differs by less than this share of the whole is the same.
_SAME = 1e-4


@dataclasses.dataclass(frozen=True, eq=False)
class SolvedArgument:
    """The argument of a function as the candidate used it.

    Attributes:
        words: what it is.
        value: what was used; the right one where the result does not decide it.
        right: what should have been used.
        noise: of each element.
        predicted: the result with what was used.
        case: the result that it explains, of other operands if the candidate was asked.
    """

    words: str
    value: Tensor
    right: Tensor
    noise: Tensor
    predicted: Tensor
    case: Case


def solve_arguments(predictor: Predictor) -> Iterator[SolvedArgument]:
    """The arguments of the functions of a call that give the candidate."""
    if predictor.case.reference.numel() > _MOST_ELEMENTS or not predictor.case.is_finite:
        return
    for position, step in reversed(predictor.steps):
        for undo in _ways_to_undo(step):
            yield from undo(predictor, position)
    yield from _weights_of_attention(predictor)


def _ways_to_undo(step: Step) -> Iterator[Callable[[Predictor, int], Iterator[SolvedArgument]]]:
    if step.name in _INVERSES:
        yield _argument_of_function
    if step.name in step_names("softmaxes"):
        yield _scores
    if step.name in NORMS:
        yield _parts_of_norm


def _result_at(predictor: Predictor, position: int) -> tuple[Step, Tensor] | None:
    """An operator of a call in float64, and the result that it must have given."""

    def predict(variation: Variation) -> Tensor | None:
        value = predictor.value(position, variation.change, wide=True)
        return None if value is None else widen(value)

    result = result_of(predict, predictor.case.given)
    return None if result is None else (result.step, result.given)


@dataclasses.dataclass(frozen=True, eq=False)
class _Solution:
    """A value in the place of another one, with the operator that uses it."""

    words: str
    value: Tensor
    right: Tensor
    noise: Tensor
    change: Callable[[Step, Tensor], Any]

    def at(self, predictor: Predictor, position: int) -> Iterator[SolvedArgument]:
        """As part of a call."""
        is_known = torch.isfinite(self.value) & torch.isfinite(self.noise)
        value = torch.where(is_known, self.value, self.right)
        noise = torch.where(is_known, self.noise, 0.0)
        if not bool(torch.isfinite(self.right).all()):
            return

        def change(step: Step) -> Any:
            return self.change(step, value)

        predicted = predictor.value(position, change, wide=True)
        if predicted is not None:
            yield SolvedArgument(
                self.words, value, self.right, noise, widen(predicted), predictor.case
            )


# --- Asking both programs again -------------------------------------------------------------------


def _ask(predictor: Predictor, operands: Sequence[Tensor]) -> Predictor | None:
    """The same call with other operands, and what the candidate gives for these."""
    runs, call = predictor.case.context.runs, predictor.call
    if runs is None or not runs.is_faithful:
        return None
    expected, candidate = runs.reference(operands), runs.candidate(operands)
    if expected is None or candidate is None or expected.shape != predictor.case.reference.shape:
        return None
    floating = []
    for tensor in call.floating:
        position = runs.place_of(tensor)
        floating.append(tensor if position is None else operands[position])
    try:
        other = call.with_floating(floating)
    except UNUSABLE:
        return None
    context = Context(operator=predictor.case.context.operator, call=other)
    return Predictor.of(Case(candidate, expected, context=context), other)


def _operands_with(runs: PlaceRuns, changes: dict[int, Tensor]) -> list[Tensor]:
    return [changes.get(position, operand) for position, operand in enumerate(runs.operands)]


def _same_step(predictor: Predictor, position: int) -> Step | None:
    return dict(predictor.steps).get(position)


# --- Functions of one argument --------------------------------------------------------------------

# What undoes a function, and the range of arguments in which it does.
_INVERSES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "sin": (torch.asin, (-math.pi / 2, math.pi / 2)),
    "cos": (torch.acos, (0.0, math.pi)),
    "exp": (torch.log, (-math.inf, math.inf)),
    "exp2": (torch.log2, (-math.inf, math.inf)),
    "expm1": (torch.log1p, (-math.inf, math.inf)),
    "log": (torch.exp, (0.0, math.inf)),
    "log2": (torch.exp2, (0.0, math.inf)),
    "log1p": (torch.expm1, (-1.0, math.inf)),
    "sqrt": (torch.square, (0.0, math.inf)),
    "rsqrt": (lambda y: y**-2, (0.0, math.inf)),
    "reciprocal": (torch.reciprocal, (-math.inf, math.inf)),
    "tanh": (torch.atanh, (-math.inf, math.inf)),
    "sigmoid": (torch.logit, (-math.inf, math.inf)),
    "erf": (torch.erfinv, (-math.inf, math.inf)),
    "atan": (torch.tan, (-math.inf, math.inf)),
    "asinh": (torch.sinh, (-math.inf, math.inf)),
}
# Other arguments, for functions that repeat themselves: for factors
# near 1, for larger and for smaller ones.
_ANGLES = ((0.3, 1.4), (0.02, 0.12), (8.0, 40.0))


def _argument_of_function(predictor: Predictor, position: int) -> Iterator[SolvedArgument]:
    step = _same_step(predictor, position)
    if step is None or not isinstance(step.values.get("self"), torch.Tensor):
        return
    x = widen(step.values["self"])
    low, high = _INVERSES[step.name][1]
    if bool(((x >= low) & (x <= high)).all()):
        yield from _undone(predictor, position)
        return
    runs = predictor.case.context.runs
    at = None if runs is None else runs.place_of(step.values["self"])
    if runs is None or at is None:
        return
    for least, most in _ANGLES:
        draw = torch.Generator().manual_seed(0)
        angles = least + (most - least) * torch.rand(x.shape, generator=draw, dtype=torch.float64)
        requested = _ask(predictor, _operands_with(runs, {at: angles.to(runs.operands[at])}))
        if requested is not None:
            yield from _undone(requested, position)


def _undone(predictor: Predictor, position: int) -> Iterator[SolvedArgument]:
    scored = _result_at(predictor, position)
    if scored is None:
        return
    step, candidate = scored
    right = widen(step.values["self"])
    value = _INVERSES[step.name][0](candidate)
    unit = roundoff(predictor.case.candidate)
    near = 1e-6 * (1 + right.abs())
    above, below = (widen(step.run(self=value + by)) for by in (near, -near))
    slope = (above - below).abs() / (2 * near)
    noise = _ROUNDINGS * unit * (candidate.abs() / slope + value.abs())
    yield from _Solution("its argument", value, right, noise, _with_argument).at(
        predictor, position
    )


def _with_argument(step: Step, value: Tensor) -> Any:
    return step.run(self=value.to(step.values["self"]))


# --- Scores of a softmax --------------------------------------------------------------------------


def _scores(predictor: Predictor, position: int) -> Iterator[SolvedArgument]:
    """The scores, up to a number for each row: what a row with a score of 0 does not leave open."""
    step = _same_step(predictor, position)
    runs = predictor.case.context.runs
    at = None if step is None or runs is None else runs.place_of(step.values["self"])
    requested = None
    if step is not None and runs is not None and at is not None:
        anchored = runs.operands[at].clone()
        anchored.select(step.values["dim"], 0).zero_()
        requested = _ask(predictor, _operands_with(runs, {at: anchored}))
    if requested is None:
        yield from _scores_without_mean(predictor, position)
        return
    scored = _result_at(requested, position)
    if scored is not None:
        yield from _anchored_scores(requested, position, *scored)


def _anchored_scores(
    predictor: Predictor, position: int, step: Step, candidate: Tensor
) -> Iterator[SolvedArgument]:
    dim = step.values["dim"]
    powers = _logarithms(step, candidate)
    if powers is None:
        return
    value = powers - powers.narrow(dim, 0, 1)
    yield from _solved_scores(
        "the input that its result stands for", value, predictor, position, step
    )


def _scores_without_mean(predictor: Predictor, position: int) -> Iterator[SolvedArgument]:
    scored = _result_at(predictor, position)
    powers = None if scored is None else _logarithms(*scored)
    if scored is None or powers is None:
        return
    step = scored[0]
    dim, right = step.values["dim"], widen(step.values["self"])
    is_seen = (right > -HUGE) & torch.isfinite(powers)
    count = is_seen.sum(dim, keepdim=True).clamp(min=1)
    left_open = (torch.where(is_seen, right - powers, 0.0).sum(dim, keepdim=True)) / count
    yield from _solved_scores(
        "the input that its result stands for", powers + left_open, predictor, position, step
    )


def _solved_scores(
    words: str, value: Tensor, predictor: Predictor, position: int, step: Step
) -> Iterator[SolvedArgument]:
    right = widen(step.values["self"])
    is_seen = right > -HUGE
    noise = 2 * _ROUNDINGS * roundoff(predictor.case.candidate) * (1 + value.abs())

    def change(step: Step, value: Tensor) -> Any:
        original = step.values["self"]
        return step.run(self=torch.where(is_seen.to(original.device), value.to(original), original))

    hidden = torch.where(is_seen, value, 0.0), torch.where(is_seen, right, 0.0)
    if not _is_of_sums(*hidden, noise, step.values["dim"]):
        yield from _Solution(words, *hidden, noise, change).at(predictor, position)


def _is_of_sums(value: Tensor, right: Tensor, noise: Tensor, dim: int) -> bool:
    """Whether several scores of each row are off by one number, and each row by another.

    Then they are right, and a part of the row was divided by another sum.
    """
    error = value - right
    is_wrong = torch.isfinite(error) & (error.abs() > _FAR * noise)
    highest = torch.where(is_wrong, error, -math.inf).amax(dim)
    lowest = torch.where(is_wrong, error, math.inf).amin(dim)
    several = is_wrong.sum(dim) > 1
    if 2 * int(several.sum()) < several.numel():
        return False
    limit = _FAR * noise.nan_to_num(0.0, 0.0, 0.0).amax(dim)
    is_one = bool(((highest - lowest) <= limit)[several].all())
    numbers = highest[several]
    return is_one and float(numbers.max() - numbers.min()) > _SAME * float(numbers.abs().max())


def _logarithms(step: Step, candidate: Tensor) -> Tensor | None:
    """Those of the shares; None if they do not add up to 1, as those of no scores do."""
    dim = step.values["dim"]
    shares = candidate if step.name == "softmax" else candidate.exp()
    total = shares.sum(dim)
    if bool((shares < 0).any()) or bool(((total - 1).abs() > _SAME).any()):
        return None
    return shares.log() if step.name == "softmax" else candidate


# --- Rows, weight and bias of a norm --------------------------------------------------------------


def _parts_of_norm(predictor: Predictor, position: int) -> Iterator[SolvedArgument]:
    """The rows before weight and bias; the weight and the bias, if the rows are right."""
    runs = predictor.case.context.runs
    requested = predictor
    if runs is not None:
        # A weight of ones and a bias of zeros hide what is done with them.
        requested = _ask(predictor, runs.vary(1)) or predictor
    scored = _result_at(requested, position)
    norm = None if scored is None else norm_of(scored[0])
    if scored is None or norm is None:
        return
    step, candidate = scored
    unit = roundoff(requested.case.candidate)
    weight, bias = (
        torch.as_tensor(tensor).detach().cpu().double() for tensor in (norm.weight, norm.bias)
    )
    plain = widen(dataclasses.replace(norm, weight=1.0, bias=0.0).value())
    noise = (
        _ROUNDINGS * unit * (candidate.abs() + bias.abs() + (plain * weight).abs()) / weight.abs()
    )
    affine = list(_affine_of_norm(requested, position, step, candidate, plain))
    yield from affine
    if not affine:
        value = (candidate - bias) / weight
        rows = _Solution("the value before weight and bias", value, plain, noise, _with_rows)
        yield from rows.at(requested, position)


def _with_rows(step: Step, value: Tensor) -> Any:
    return with_norm(lambda norm: norm.finish(value.to(norm.x)))(step)


def _affine_of_norm(
    predictor: Predictor, position: int, step: Step, candidate: Tensor, plain: Tensor
) -> Iterator[SolvedArgument]:
    """Each weight and bias by least squares: what each column was multiplied by."""
    norm: Any = norm_of(step)
    wide = [torch.as_tensor(tensor).detach().cpu().double() for tensor in (norm.weight, norm.bias)]
    shape = next((tensor.shape for tensor in wide if tensor.dim()), None)
    if shape is None:
        return
    padded = (1,) * (candidate.dim() - len(shape)) + tuple(shape)
    axes = [axis for axis, size in enumerate(padded) if size == 1]
    if not axes or math.prod(candidate.shape[axis] for axis in axes) < 4:  # noqa: PLR2004
        return
    mean = partial(torch.mean, dim=axes, keepdim=True)
    apart = plain - mean(plain)
    weight = mean(apart * candidate) / mean(apart * apart)
    bias = mean(candidate) - weight * mean(plain)
    scatter = mean((candidate - plain * weight - bias).square()).sqrt()
    size = _ROUNDINGS * roundoff(predictor.case.candidate) * mean(candidate.square()).sqrt()
    if bool((scatter > 4 * size).any()):
        return  # it is the rows that are wrong
    noise = torch.maximum(scatter, size)
    for name, value, other in (("weight", weight, bias), ("bias", bias, weight)):
        right, partner = wide if name == "weight" else wide[::-1]
        is_kept = (other.reshape(shape) - partner.expand(shape)).abs() <= 16 * noise.reshape(shape)
        if right.dim() and bool(is_kept.all()):
            spread = noise / mean(apart * apart).sqrt() if name == "weight" else noise
            yield from _Solution(
                f"its {name}", value.reshape(shape), right, spread.reshape(shape),
                partial(_with_affine, name=name),
            ).at(predictor, position)  # fmt: skip


def _with_affine(step: Step, value: Tensor, name: str) -> Any:
    return step.run(**{name: value.to(step.values[name]).reshape(step.values[name].shape)})


# --- Weights and scores of an attention -----------------------------------------------------------

_RANK = 4
_MOST_KEYS = 512


def _weights_of_attention(predictor: Predictor) -> Iterator[SolvedArgument]:
    """The scores, else what the values are multiplied by, as values of 0 and 1 show them."""
    runs = predictor.case.context.runs
    steps = [(index, step) for index, step in predictor.steps if is_attention(step)]
    if runs is None or not steps or "grad_out" in steps[0][1].values:
        return
    position, step = steps[-1]
    key, value = (runs.place_of(step.values[name]) for name in ("key", "value"))
    if key is None or value is None or step.values["key"].dim() != _RANK:
        return
    anchored = runs.operands[key].clone()
    anchored[..., 0, :] = 0
    # The first key is zeros, so its score is known.
    for changes in ({key: anchored}, {}):
        requested = predictor if not changes else _ask(predictor, _operands_with(runs, changes))
        shown = None if requested is None else _shown_weights(runs, changes, value, step)
        at = None if requested is None else _same_step(requested, position)
        if requested is None or shown is None or at is None:
            continue
        query = runs.place_of(step.values["query"])
        if changes and query is not None:

            def show(queries: Tensor, index: int = query) -> Tensor | None:
                return _shown_weights(runs, {key: anchored, index: queries}, value, step)

            yield from _keys(requested, position, at, show)
        solve = _scores_of_weights if changes else _plain_weights
        yield from solve(requested, position, at, shown)


def _shown_weights(
    runs: PlaceRuns, changes: dict[int, Tensor], value: int, step: Step
) -> Tensor | None:
    """What the candidate multiplies the values by: values with a 1 for one key show it."""
    operand = runs.operands[value]
    count, size = operand.shape[-2:]
    heads = step.values["query"].shape[-3]
    if count > _MOST_KEYS:
        return None
    parts = []
    for start in range(0, count, size):
        unit = torch.zeros_like(operand)
        width = min(size, count - start)
        places = torch.arange(width)
        unit[..., start + places, places] = 1
        result = runs.candidate(_operands_with(runs, {**changes, value: unit}))
        if result is None or result.dim() != _RANK or result.shape[-3] != heads:
            return None
        parts.append(widen(result)[..., :width])
    return torch.cat(parts, -1)


_MOST_CALLS = 16


def _keys(
    predictor: Predictor, position: int, step: Step, show: Callable[[Tensor], Tensor | None]
) -> Iterator[SolvedArgument]:
    """The keys, as queries with one feature each show them where every query sees every key.

    Args:
        show: what the candidate multiplies the values by, for other queries.
    """
    query, right = step.values["query"], widen(step.values["key"])
    rows, size = query.shape[-2:]
    calls = math.ceil(size / rows)
    is_open = bool((weights_and_values(step)[0] > 0).all())
    if not is_open or calls * right.shape[-2] > _MOST_CALLS * step.values["value"].shape[-1]:
        return
    groups = query.shape[-3] // right.shape[-3]
    # Large enough to be seen, small enough for no weight to vanish.
    length = 2.0 / (factor_of(step) * float(right.abs().max().clamp(min=1e-9)))
    columns = []
    for start in range(0, size, rows):
        width = min(rows, size - start)
        queries = torch.zeros_like(query)
        places = torch.arange(width)
        queries[..., places, start + places] = length
        shown = show(queries)
        if shown is None or not bool((shown > 0).all()):
            return
        columns.append((shown.log() - shown[..., :1].log())[..., :width, :])
    scores = torch.cat(columns, -2).mT
    value = scores[..., ::groups, :, :] / (length * factor_of(step))
    unit = roundoff(predictor.case.candidate)
    noise = 4 * _ROUNDINGS * unit * (right.abs() + right.abs().max())
    yield from _Solution("key", value, right, noise, _with_keys).at(predictor, position)


def _with_keys(step: Step, value: Tensor) -> Any:
    # A fused kernel may read memory as it expects it to be.
    return step.run(key=torch.empty_like(step.values["key"]).copy_(value))


def _plain_weights(
    predictor: Predictor, position: int, step: Step, shown: Tensor
) -> Iterator[SolvedArgument]:
    right = widen(weights_and_values(step)[0])
    noise = _ROUNDINGS * roundoff(predictor.case.candidate) * (right + 1 / right.shape[-1])
    yield from _Solution(
        "the matrix that multiplies the values", shown, right, noise, _with_weights
    ).at(predictor, position)


def _with_weights(step: Step, value: Tensor) -> Any:
    values = weights_and_values(step)[1]
    return step.with_first(value.to(values) @ values)


def _scores_of_weights(
    predictor: Predictor, position: int, step: Step, shown: Tensor
) -> Iterator[SolvedArgument]:
    """Relative to the first key, which is zeros."""
    right_weights = widen(weights_and_values(step)[0])
    is_seen = (right_weights > 0) & (right_weights[..., :1] > 0)
    adds_up = bool(((shown.sum(-1) - 1).abs() <= _SAME).all())
    if not adds_up or bool((shown < 0).any()) or not torch.equal(shown > 0, right_weights > 0):
        return
    value = shown.log() - shown[..., :1].log()
    right = widen(scores_of(step))
    unit = roundoff(predictor.case.candidate)
    noise = 2 * _ROUNDINGS * unit * (1 + value.abs())

    def change(step: Step, value: Tensor) -> Any:
        weights, values = weights_and_values(step)
        powers = torch.where(is_seen.to(weights.device), value.to(weights), -math.inf)
        return step.with_first(powers.softmax(-1).nan_to_num(0.0) @ values)

    hidden = torch.where(is_seen, value, 0.0), torch.where(is_seen, right, 0.0)
    error = torch.where(is_seen, value - right, math.nan)[..., 1:]
    largest, least = (error.nan_to_num(-sign * math.inf) * sign for sign in (1, -1))
    apart = largest.amax(-1, keepdim=True) + least.amax(-1, keepdim=True)
    if bool((apart <= noise.amax(-1, keepdim=True)).all()):
        return  # only the first key is off, or all others are: which one is not known
    if not _is_of_sums(*hidden, noise, -1):
        words = "the matrix of scores"
        yield from _Solution(words, *hidden, noise, change).at(predictor, position)
