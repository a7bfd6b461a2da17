"""Sums of the wrong terms: softmax, reductions, scattered sums, matrix products."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.steps import (
    then,
    with_altered,
    with_argument,
    with_factor,
    with_formula,
    with_order,
)
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


def sum_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of operators that sum."""
    name = step.name
    if name in step_names("softmaxes"):
        yield from _softmax_variations(step)
    if name in _REDUCING:
        yield from _reduction_variations(step)
    if name in ("cumsum", "cumprod"):
        yield from _running_variations(step)
    if name in _SCATTERS:
        yield from _scatter_variations(step)
    if name in PRODUCTS:
        yield from _product_variations(step)


def tails(length: int) -> list[int]:
    """How many of the last terms may be left out: one, the rest of a tile, a whole tile."""
    tiles = [2**power for power in range(1, 10) if 2**power < length]
    rests = [length % tile for tile in tiles]
    return list(dict.fromkeys(count for count in (1, *rests, *tiles[::-1]) if 0 < count < length))


def left_out(length: int) -> list[tuple[int, int]]:
    """Which terms may be left out: (how many of the first, how many of the last)."""
    counts = tails(length)
    return [*((0, count) for count in counts), *((count, 0) for count in counts)]


def words_of(first: int, last: int) -> str:
    """`the last 3`, `the first`: which terms are left out."""
    count = first or last
    return f"the {'first' if first else 'last'}{'' if count == 1 else f' {count}'}"


def repeated_spans(length: int) -> list[tuple[int, int]]:
    """Where terms may be counted twice: the last tile, or what it shares with the one before."""
    tiles = [2**power for power in range(3, 10) if 2**power < length]
    overlaps = [(length - tile, tile - length % tile) for tile in tiles if length % tile]
    last = [(length // tile * tile - tile, tile) for tile in tiles]
    return list(dict.fromkeys(overlaps + last))


def zero_ends(axis: int, first: int, last: int) -> Callable[[Tensor], Tensor]:
    """Zeros in so many of the first and last slices along an axis."""

    def alter(value: Tensor) -> Tensor:
        value = value.clone()
        value.narrow(axis, 0, first).zero_()
        value.narrow(axis, value.shape[axis] - last, last).zero_()
        return value

    return alter


def _elements_left_out(
    size: int, *, alone: bool = True
) -> Iterator[tuple[PatternKind, str, int, int]]:
    """The kind and the words, and how many of the first and of the last elements are left out.

    Args:
        alone: there is one element at each place.
    """
    for first, last in left_out(size):
        is_one = first + last == 1
        kind = PatternKind.OFF_BY_ONE if is_one and alone else PatternKind.PARTIAL_SUM
        verb = "element is" if is_one else "elements are"
        yield kind, f"{words_of(first, last)} {verb}", first, last


# --- Softmax and reductions -----------------------------------------------------------------------


def _softmax_variations(step: Step) -> Iterator[Variation]:
    dim, is_log = step.values["dim"], step.name == "log_softmax"
    size = step.values["self"].shape[dim] if step.values["self"].dim() else 1

    def over(step: Step, part: slice) -> Any:
        x = step.values["self"].movedim(dim, -1)
        value = x - x[..., part].logsumexp(-1, keepdim=True)
        return (value if is_log else value.exp()).movedim(-1, dim)

    for factor, words in (
        (math.log(2), "exp2 is taken instead of exp: ln 2 is missing"),
        (math.log2(math.e), "the input is multiplied by log2 e, but exp is taken"),
        (-1.0, "the sign of the input is flipped"),
        (0.5, "the input is halved"),
        (2.0, "the input is doubled"),
    ):
        yield Variation(PatternKind.FACTOR, words, with_factor("self", factor))
    for width in {length for length in (size, *step.values["self"].shape) if length > 1}:
        sentence = f"the input is divided by sqrt({width})"
        yield Variation(PatternKind.FACTOR, sentence, with_factor("self", 1 / math.sqrt(width)))
        sentence = f"the input is multiplied by sqrt({width})"
        yield Variation(PatternKind.FACTOR, sentence, with_factor("self", math.sqrt(width)))
    for kind, some, first, last in _elements_left_out(size):
        sentence = f"{some} left out of the {size} in the sum that softmax divides by"
        yield Variation(kind, sentence, partial(over, part=slice(first, size - last)))
    sentence = "it is not divided by the sum"
    change = partial(_skip_normalisation, is_log=is_log)
    yield Variation(PatternKind.MISSING_REDUCTION, sentence, change)
    other, words = torch.log_softmax, "the logarithm of softmax"
    if is_log:
        other, words = torch.softmax, "the logarithm is left out"
    yield Variation(PatternKind.OTHER_FUNCTION, words, lambda step: other(step.values["self"], dim))
    if not is_log:
        sentence = "the sum that softmax divides by has 1 added"
        yield Variation(PatternKind.OTHER_FUNCTION, sentence, _softmax_with_one)
    for words, top, below in (
        ("of the numerator only", True, False),
        ("of the denominator only", False, True),
    ):
        sentence = f"the largest value is subtracted from the exponents {words}"
        change = partial(_softmax_half_shifted, top=top, below=below, is_log=is_log)
        yield Variation(PatternKind.WRONG_REDUCTION, sentence, change)
    sentence = "each element by itself: the sigmoid instead of softmax"
    alone = torch.nn.functional.logsigmoid if is_log else torch.sigmoid
    yield Variation(PatternKind.OTHER_FUNCTION, sentence, lambda step: alone(step.values["self"]))
    sentence = "the softmax of the whole tensor instead of each row"
    yield Variation(PatternKind.WRONG_AXIS, sentence, _softmax_of_all)


def _skip_normalisation(step: Step, *, is_log: bool) -> Any:
    x, dim = step.values["self"], step.values["dim"]
    value = x - x.amax(dim, keepdim=True)
    result: Tensor = value if is_log else value.exp()
    return result


def _softmax_half_shifted(step: Step, *, top: bool, below: bool, is_log: bool) -> Tensor:
    x, dim = step.values["self"], step.values["dim"]
    largest = x.amax(dim, keepdim=True)
    value = (x - largest if top else x) - (x - largest if below else x).logsumexp(dim, keepdim=True)
    result: Tensor = value if is_log else value.exp()
    return result


def _softmax_with_one(step: Step) -> Tensor:
    x, dim = step.values["self"], step.values["dim"]
    above = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
    return above.softmax(dim).narrow(dim, 0, x.shape[dim])


def _softmax_of_all(step: Step) -> Any:
    x = step.values["self"]
    return step.run(self=x.reshape(-1), dim=0).reshape(x.shape)


_REDUCERS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "prod": lambda x, dims, keepdim: _product(x, dims, keepdim=keepdim),
    "logsumexp": torch.logsumexp,
    "linalg_vector_norm": lambda x, dims, keepdim: x.square().sum(dims, keepdim).sqrt(),
    "var": lambda x, dims, keepdim: x.var(dims, keepdim=keepdim, correction=0),
    "std": lambda x, dims, keepdim: x.std(dims, keepdim=keepdim, correction=0),
    "first": lambda x, dims, keepdim: _pick_position(x, dims, 0, keepdim=keepdim),
    "last": lambda x, dims, keepdim: _pick_position(x, dims, -1, keepdim=keepdim),
}
_REDUCER_NAMES = {
    "amax": "the maximum",
    "amin": "the minimum",
    "linalg_vector_norm": "the norm",
    "var": "the variance",
    "std": "the standard deviation",
    "prod": "the product",
    "first": "the first element",
    "last": "the last element",
}
_ALIASES = {"max": "amax", "min": "amin", "norm": "linalg_vector_norm"}
_AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "the square": torch.square,
    "the root": torch.sqrt,
    "the exponential": torch.exp,
    "the logarithm": torch.log,
}
_OPPOSITES: dict[str, Any] = {
    "argmax": torch.argmin,
    "argmin": torch.argmax,
    "any": torch.all,
    "all": torch.any,
}
_PICKING = frozenset({"argmax", "argmin", "any", "all", "median"})
_SPREADS = step_names("variance", "deviation")
_REDUCING = frozenset({*_REDUCERS, *_ALIASES, *_PICKING, *_SPREADS})


def _pick_position(x: Tensor, dims: tuple[int, ...], position: int, *, keepdim: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.select(dim, position).unsqueeze(dim) if keepdim else x.select(dim, position)
    return x


def _product(x: Tensor, dims: tuple[int, ...], *, keepdim: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim, keepdim=keepdim)
    return x


def reduced_dims(step: Step) -> tuple[int, ...]:
    """The axes that a reduction has, counted from the first."""
    rank, dim = step.values["self"].dim(), step.values.get("dim")
    if isinstance(dim, int):
        return (dim % rank,) if rank else ()
    return tuple(axis_number % rank for axis_number in dim) if dim else tuple(range(rank))


def _reduction_variations(step: Step) -> Iterator[Variation]:
    x, dims = step.values["self"], reduced_dims(step)
    name = _ALIASES.get(step.name, step.name)
    for dim in dims:
        others = math.prod(x.shape[axis_number] for axis_number in dims) // max(1, x.shape[dim])
        yield from _length_variations(name, dim, x.shape[dim], others)
    if name in ("sum", "mean") and dims[-1] - dims[0] == len(dims) - 1 > 0:
        yield from _flat_variations(math.prod(x.shape[axis_number] for axis_number in dims), dims)
    if name == "mean":
        yield from _divisor_variations(x, dims)
    if name in _REDUCERS and x.is_floating_point():
        yield from _other_reductions(step, name, dims)
    if name in _SPREADS:
        yield from _correction_variations(step, dims)
        yield from _raw_variations(step, dims)
    if name in ("argmax", "argmin") and step.values.get("dim") is not None:
        for by in (1, -1):
            sentence = f"every position is one too {'large' if by > 0 else 'small'}"
            moved = partial(_moved_position, by=by, size=x.shape[dims[0]])
            yield Variation(PatternKind.WRONG_INDEX, sentence, then(moved))
    if name in _OPPOSITES:
        opposite = _OPPOSITES[name]
        sentence = f"{opposite.__name__} instead of {name}"
        change = partial(opposite_result, function=opposite)
        yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def _moved_position(position: Tensor, by: int, size: int) -> Tensor:
    return (position + by) % size


def _correction_variations(step: Step, dims: tuple[int, ...]) -> Iterator[Variation]:
    if "correction" not in step.values:
        return
    count, less = _count_and_correction(step, dims)
    for other in (0, 1):
        if other != less and count > max(other, less):
            sentence = f"the variance is divided by {count - other} instead of {count - less}"
            yield Variation(PatternKind.OFF_BY_ONE, sentence, with_argument("correction", other))


def _count_and_correction(step: Step, dims: tuple[int, ...]) -> tuple[int, int]:
    """How many elements a variance is of, and how many less it is divided by."""
    less = step.values.get("correction")
    less = int(less) if isinstance(less, int | float) and not isinstance(less, bool) else 1
    return math.prod(step.values["self"].shape[dim] for dim in dims), less


def _raw_variations(step: Step, dims: tuple[int, ...]) -> Iterator[Variation]:
    count, less = _count_and_correction(step, dims)

    def raw(step: Step, divisor: int) -> Any:
        total = step.values["self"].square().sum(dims, keepdim=bool(step.values.get("keepdim")))
        value = total / divisor
        return step.with_first(value.sqrt() if step.name in step_names("deviation") else value)

    for divisor in dict.fromkeys((count - less, count)):
        if divisor > 0:
            sentence = f"the mean is not subtracted: the sum of the squares, divided by {divisor}"
            yield Variation(PatternKind.STATISTICS, sentence, partial(raw, divisor=divisor))


def _length_variations(name: str, dim: int, size: int, others: int) -> Iterator[Variation]:
    """With some of the elements left out, or counted twice.

    Args:
        others: how many elements there are at each place, along the other axes that are reduced.
    """
    for kind, some, first, last in _elements_left_out(size, alone=others == 1):
        residual = size - last - first
        if residual < 2:  # noqa: PLR2004
            continue
        sentence = f"{some} left out of the {size} along dim {dim}"
        cut = with_altered("self", partial(torch.narrow, dim=dim, start=first, length=residual))
        yield Variation(kind, sentence, cut)
        if name == "mean":
            sentence = f"{sentence}, which is still divided by {size}"
            yield Variation(kind, sentence, scale_result(residual / size, cut))
    if name in ("sum", "mean"):
        for start, count in repeated_spans(size):
            sentence = f"elements {start} to {start + count - 1} along dim {dim} count twice"
            change = partial(_with_repeated, dim=dim, start=start, count=count)
            yield Variation(PatternKind.DOUBLED_REDUCTION, sentence, change)


def _flat_variations(size: int, dims: tuple[int, ...]) -> Iterator[Variation]:
    """With some of the first or last elements left out, of several axes that are reduced as one."""

    def cut(step: Step, first: int, last: int) -> Any:
        x = step.values["self"].flatten(dims[0], dims[-1])
        x = x.narrow(dims[0], first, size - first - last)
        return step.run(self=x, **({"dim": [dims[0]]} if "dim" in step.values else {}))

    for kind, some, first, last in _elements_left_out(size):
        sentence = f"{some} left out of the {size} along dims {list(dims)}"
        yield Variation(kind, sentence, partial(cut, first=first, last=last))


def _other_reductions(step: Step, name: str, dims: tuple[int, ...]) -> Iterator[Variation]:
    keepdim = bool(step.values.get("keepdim", False))
    right = _REDUCER_NAMES.get(name, f"the {name}")
    for other, reduce in _REDUCERS.items():
        if other != name:
            words = _REDUCER_NAMES.get(other, f"the {other}")
            change = with_formula(partial(_reduce_input, reduce=reduce, dims=dims, keepdim=keepdim))
            is_reduction = {name, other} == {"sum", "mean"} or other in ("first", "last")
            kind = PatternKind.WRONG_REDUCTION if is_reduction else PatternKind.OTHER_FUNCTION
            yield Variation(kind, f"{words} instead of {right}", change)
    kind = PatternKind.OTHER_FUNCTION
    for words, alter in (("absolute values", torch.abs), ("squares", torch.square)):
        yield Variation(kind, f"{right} of the {words}", with_altered("self", alter))
    for words, after in _AFTERWARDS.items():
        yield Variation(kind, f"{words} of {right}", then(after))


def _with_repeated(step: Step, dim: int, start: int, count: int) -> Any:
    x = step.values["self"]
    value = step.run(self=torch.cat([x, x.narrow(dim, start, count)], dim))
    return value * ((x.shape[dim] + count) / x.shape[dim]) if step.name == "mean" else value


def _reduce_input(
    step: Step, reduce: Callable[..., Tensor], dims: tuple[int, ...], *, keepdim: bool
) -> Tensor:
    return reduce(step.values["self"], dims, keepdim)


def scale_result(
    factor: float, change: Callable[[Step], Any] = lambda step: step.run()
) -> Callable[[Step], Any]:
    """The result, or that of a mistake, times a factor."""
    return lambda step: change(step) * factor


def opposite_result(step: Step, function: Callable[..., Any]) -> Any:
    """Another function of the same arguments."""
    names = ("dim", "keepdim") if step.values.get("dim") is not None else ()
    further = (step.values[name] for name in names if name in step.values)
    return function(step.values["self"], *further)


def _divisor_variations(x: Tensor, dims: tuple[int, ...]) -> Iterator[Variation]:
    length = math.prod(x.shape[dim] for dim in dims)
    others = [extent for extent in {*x.shape, x.numel()} if extent not in (1, length)]
    for kind, counts in (
        (PatternKind.OFF_BY_ONE, [length - 1, length + 1]),
        (PatternKind.FACTOR, others),
    ):
        for count in counts:
            if count > 0:
                sentence = f"the mean of {length} elements is divided by {count}"
                yield Variation(kind, sentence, scale_result(length / count))


def _running_variations(step: Step) -> Iterator[Variation]:
    def exclusive(step: Step) -> Any:
        x, dim = step.values["self"], step.values["dim"]
        start = torch.full_like(x.narrow(dim, 0, 1), 0.0 if step.name == "cumsum" else 1.0)
        return step.run(self=torch.cat([start, x.narrow(dim, 0, x.shape[dim] - 1)], dim))

    def backwards(step: Step) -> Any:
        dim = step.values["dim"]
        return step.run(self=step.values["self"].flip(dim)).flip(dim)

    sentence = "each sum leaves out its own element: exclusive, not inclusive"
    yield Variation(PatternKind.OFF_BY_ONE, sentence, exclusive)
    sentence = "it runs from the last element to the first"
    yield Variation(PatternKind.ARGUMENT, sentence, backwards)

    x = step.values["self"]
    for tile in (2**power for power in range(2, 12)):
        if x.dim() and tile < x.shape[step.values["dim"]]:
            sentence = f"it starts again every {tile} elements: the sum so far is not carried over"
            yield Variation(PatternKind.PARTIAL_SUM, sentence, partial(restart, sizes=tile))


def restart(step: Step, sizes: int | list[int]) -> Tensor:
    """A running sum or product that starts again after parts of this size, or of these sizes."""
    x, dim = step.values["self"], step.values["dim"]
    if isinstance(sizes, list) and sum(sizes) < x.shape[dim]:
        sizes = [*sizes, x.shape[dim] - sum(sizes)]
    return torch.cat([step.run(self=part) for part in x.split(sizes, dim)], dim)


# --- Scattered sums -------------------------------------------------------------------------------

_WRITES = step_names("writes at indices")
_SCATTERS = step_names("embedding backward", "indexed sum") | _WRITES


def _scatter_variations(step: Step) -> Iterator[Variation]:
    if step.name != "embedding_dense_backward":
        adds = step.values.get("accumulate", step.name not in _WRITES)
        sentence = f"nothing is {'added' if adds else 'written'}"
        keep = lambda step: step.values["self"].clone()  # noqa: E731
        yield Variation(PatternKind.MISSING_OPERAND, sentence, keep)
    if step.name in _WRITES:
        yield from _written_otherwise(step)
        return  # whether they add up, a flag says
    for is_last, is_added in itertools.product((True, False), (False, True)):
        ending = "is added" if is_added else "wins"
        which = "last" if is_last else "first"
        sentence = f"rows with the same index are not added up: the {which} one {ending}"
        change = partial(_overwritten, last=is_last, added=is_added)
        yield Variation(PatternKind.LOST_ACCUMULATION, sentence, change)
    if step.name == "embedding_dense_backward":
        indices = step.values["indices"]
        for axis, size in enumerate(indices.shape):
            for count in tails(size):
                sentence = f"the last {count} of the {size} indices along axis {axis} are left out"
                change = partial(_without_rows, axis=axis, size=size - count)
                yield Variation(PatternKind.PARTIAL_SUM, sentence, change)
    # With what is there already or without it: the same if they are added to zeros.
    for ending, with_self, is_added in (
        ("", False, False),
        (" together with what is there already", True, False),
        (" and then added", False, True),
    ):
        sentence = f"rows with the same index are averaged{ending}, not added up"
        change = partial(_average_rows, with_self=with_self, added=is_added)
        yield Variation(PatternKind.WRONG_REDUCTION, sentence, change)


def _written_otherwise(step: Step) -> Iterator[Variation]:
    """What is written is added to what was there, or joined with it in another way."""
    name = next((key for key in ("src", "source", "values") if key in step.values), "")
    source = step.values.get(name)
    if not isinstance(source, torch.Tensor) or step.values.get("accumulate"):
        return
    for kind, words, combine in (
        (PatternKind.RESIDUAL, "added to what was there, not written", torch.add),
        (PatternKind.FACTOR, "multiplied by what was there, not written", torch.mul),
        (PatternKind.OTHER_FUNCTION, "written only where it is larger", torch.maximum),
        (PatternKind.OTHER_FUNCTION, "written only where it is smaller", torch.minimum),
    ):
        change = partial(_join_with_source, name=name, join=combine)
        yield Variation(kind, f"{name} is {words}", change)


def _join_with_source(step: Step, name: str, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    into, source = step.values["self"], step.values[name]
    marked = step.run(**{"self": torch.zeros_like(into), name: torch.ones_like(source)})
    return torch.where(marked != 0, join(into, step.run()), into)


def _without_rows(step: Step, axis: int, size: int) -> Any:
    rows, indices = step.values["grad_output"], step.values["indices"]
    return step.run(grad_output=rows.narrow(axis, 0, size), indices=indices.narrow(axis, 0, size))


def _parts(step: Step) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tensor to add to, the rows, their indices and the axis."""
    values = step.values
    if step.name == "embedding_dense_backward":
        rows = values["grad_output"].reshape(values["indices"].numel(), -1)
        index = values["indices"].reshape(-1)
        rows = rows.masked_fill((index == values["padding_idx"])[:, None], 0.0)
        zero = rows.new_zeros(values["num_weights"], rows.shape[1])
        return zero, rows, index, 0
    rows = values["source"] * values["alpha"] if step.name == "index_add" else values["src"]
    return values["self"], rows, values["index"], values["dim"]


def _overwritten(step: Step, *, last: bool, added: bool) -> Tensor:
    """Later rows overwrite earlier ones, in order, one at a time.

    Args:
        added: what remains is added to what was there.
    """
    into, rows, index, dim = _parts(step)
    value = torch.zeros_like(into) if added else into.clone()
    if step.name == "scatter_add":
        order = range(index.shape[dim])
        for position in order if last else reversed(order):
            chosen = index.narrow(dim, position, 1)
            value.scatter_(dim, chosen, rows.narrow(dim, position, 1))
        return into + value if added else value
    winner = torch.full((into.shape[dim],), -1, dtype=torch.long, device=index.device)
    places = torch.arange(len(index), device=index.device)
    amount = "amax" if last else "amin"
    winner = winner.scatter_reduce(0, index.long(), places, amount, include_self=False)
    hit = winner >= 0
    value.index_copy_(dim, hit.nonzero().flatten(), rows.index_select(dim, winner[hit]))
    return into + value if added else value


def _average_rows(step: Step, *, with_self: bool, added: bool) -> Tensor:
    into, rows, index, dim = _parts(step)
    start = torch.zeros_like(into) if added else into
    reduce = start.scatter_reduce if step.name == "scatter_add" else start.index_reduce
    value = reduce(dim, index, rows, "mean", include_self=with_self)
    return into + value if added else value


# --- Matrix products ------------------------------------------------------------------------------

PRODUCTS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def _product_variations(step: Step) -> Iterator[Variation]:
    left, right = PRODUCTS[step.name]
    length = step.values[left].shape[-1]

    def cut(step: Step, start: int, size: int) -> Any:
        a, b = (step.values[name] for name in (left, right))
        return step.run(**{left: a.narrow(-1, start, size), right: b.narrow(-2, start, size)})

    if "beta" in step.values:
        sentence = "the product is left out"
        yield Variation(PatternKind.MISSING_OPERAND, sentence, _without_product)
        sentence = "the product is subtracted"
        yield Variation(PatternKind.SIGN, sentence, negate_alpha)
    for first, last in left_out(length):
        end = "first" if first else "last"
        words = f"the {end} {first + last} of the {length} terms of each sum are missing"
        change = partial(cut, start=first, size=length - first - last)
        yield Variation(PatternKind.PARTIAL_SUM, words, change)

    for words, order in orders_of_terms(length):
        sentence = (
            f"the terms of the first factor are in another order than those of the second: {words}"
        )
        yield Variation(PatternKind.PERMUTATION, sentence, with_order(left, -1, order))

    def counted_twice(step: Step, start: int, count: int) -> Any:
        a, b = (step.values[name] for name in (left, right))
        a = torch.cat([a, a.narrow(-1, start, count)], -1)
        return step.run(**{left: a, right: torch.cat([b, b.narrow(-2, start, count)], -2)})

    for start, count in repeated_spans(length):
        some = f"terms {start} to {start + count - 1} of the {length} terms"
        change = partial(counted_twice, start=start, count=count)
        words = f"{some} of each sum count twice"
        yield Variation(PatternKind.DOUBLED_REDUCTION, words, change)


def _without_product(step: Step) -> Any:
    return (step.values["self"] * step.values["beta"]).expand_as(step.run())


def negate_alpha(step: Step) -> Any:
    """The operator with the factor on what is added negated."""
    return step.run(alpha=-step.values["alpha"])


def orders_of_terms(length: int) -> Iterator[tuple[str, Tensor]]:
    """Orders in which the terms of one factor may be, in words."""
    index = torch.arange(length)
    for groups in (1, 2, 4):
        if length % groups == 0 and length > 2 * groups:
            words = "reversed" if groups == 1 else f"reversed in each of {groups} groups"
            yield words, index.reshape(groups, -1).flip(1).flatten()
    if length % 2 == 0 and length > 2:  # noqa: PLR2004
        yield "the two halves are swapped", index.roll(length // 2)
        yield "neighbours are swapped", index.reshape(-1, 2).flip(1).flatten()
    for groups in dict.fromkeys((2, 3, 4, 8, length // 2, length // 4)):
        if 1 < groups < length and length % groups == 0:
            words = f"{groups} groups are interleaved"
            yield words, index.reshape(groups, -1).T.flatten()
