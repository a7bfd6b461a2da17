"""A region in the words of a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paritas.diagnosis.regions.places import Place, index_text, rank_of, tail_of
from paritas.numerics.diagnoses import Region

if TYPE_CHECKING:
    from paritas.diagnosis.cases import Case
    from paritas.diagnosis.regions.coordinates import Coordinate
    from paritas.diagnosis.regions.spans import Span

__all__ = ["worded"]

_DENSE = 0.95
_FEW = 3
_PLAINLY = 0.5
_UNEVEN_Z = 8.0


@dataclasses.dataclass(frozen=True)
class _Unit:
    """What the indices of an axis are called."""

    one: str
    many: str
    along: str = ""


def worded(place: Place, case: Case) -> Region:
    """The region as it is reported."""
    number, size = place.marks.number, place.marks.size
    phrase = _phrase(place, case)
    indexed = index_text(place) or ("[...]" if place.kind == "everywhere" else "")
    amount = _amount(number, size)
    if place.kind == "everywhere" and number < _PLAINLY * place.marks.total:
        amount += " by more than the limit, the others by less"
    notes = [amount, *_notes(place)]
    mostly = "mostly " if place.kind == "mostly" else ""
    return Region(
        kind=place.named(case.context.world),
        text=indexed or phrase,
        elements=number,
        share=number / size,
        sentence=f"{mostly}{phrase} ({', '.join(notes)})",
    )


def _phrase(place: Place, case: Case) -> str:
    match place.kind:
        case "everywhere":
            return (
                "everywhere but where the reference is zero" if place.marks.hides else "everywhere"
            )
        case "scatter":
            return f"scattered without a pattern{_unevenness(place, case)}"
        case "nonfinite":
            side = "reference" if place.any_finite else "candidate"
            return f"only where the {side} is not finite"
    match place.found.kind:
        case "flat":
            return _flat(place)
        case "zeros":
            return "only where the reference is zero"
        case "padding":
            axis = place.found.axis
            return f"in the padding, where the reference stays the same to the end of axis {axis}"
    return _product(place, case)


def _product(place: Place, case: Case) -> str:
    inside = [
        _axis_phrase(coordinate.axes[0], span, place, case)
        for coordinate, span in place.limits
        if coordinate.name == "axis"
    ]
    boxed = f"in {_joined(inside)}" if inside else ""
    for coordinate, span in place.limits:
        if coordinate.name != "axis":
            pair = _pair_phrase(coordinate, span, len(place.shape))
            return f"{pair}, {boxed}" if boxed else pair
    return boxed


def _axis_phrase(axis: int, span: Span, place: Place, case: Case) -> str:
    size, unit = place.shape[axis], _unit(axis, len(place.shape), case.context.axes)
    ranks = rank_of(span, size, case.context.world)
    plain = _span_phrase(span, size, unit)
    if ranks:
        first, last, mesh, number = ranks
        who = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"the part of {who} of {number} along {mesh}, {plain}"
    tail = tail_of(span, size)
    return f"{plain}, {tail}" if tail else plain


def _span_phrase(span: Span, size: int, unit: _Unit) -> str:
    many = f"{size} {unit.many}{unit.along}"
    match span.kind:
        case "index":
            return f"{unit.one} {span.start} of {size}{unit.along}"
        case "range" if span.start == 0:
            return _end("first", "last", span.stop, size, many)
        case "range" if span.stop == size:
            return _end("last", "first", size - span.start, size, many)
        case "range":
            return f"{unit.many} {span.start} to {span.stop - 1} of {size}{unit.along}"
        case "stride":
            bounds = "" if span.stop == size else f" to {span.stop - 1}"
            return f"every {_ordinal(span.step)} of {many}, from {span.start}{bounds}"
        case "list":
            names = _joined([str(value) for value in span.values])
            return f"{unit.many} {names} of {size}{unit.along}"
        case "border":
            return f"the first and the last {_some(span.width)}of {many}"
    side = ("first", "last", "first and the last")[span.start]
    return f"the {side} {_some(span.width)}of every {span.step} of {many}"


def _end(side: str, other: str, number: int, size: int, many: str) -> str:
    left = size - number
    if 4 * left <= number:
        return f"all but the {other} {_some(left)}of {many}"
    return f"the {side} {_some(number)}of {many}"


def _some(number: int) -> str:
    return "" if number == 1 else f"{number} "


def _pair_phrase(coordinate: Coordinate, span: Span, dimensions: int) -> str:
    first, second = coordinate.axes
    whose = "" if dimensions == 2 else f" of axes {first} and {second}"  # noqa: PLR2004
    if coordinate.name == "frame":
        rim = f"the outermost {span.width}" if span.width > 1 else "the outermost row and column"
        tile = coordinate.tile
        around = f" of each tile of {tile} x {tile}" if tile else ""
        return f"on the border: {rim} at each side{around}{whose}"
    low, high = span.start, span.stop - 1
    match span.kind:
        case "index":
            return f"{_from_diagonal(low) or 'on the diagonal'}{whose}"
        case "above":
            near = {0: "on and above the diagonal", 1: "above the diagonal"}
            return near.get(low, f"from diagonal {low} upwards") + whose
        case "below":
            near = {0: "on and below the diagonal", -1: "below the diagonal"}
            return near.get(high, f"from diagonal {high} downwards") + whose
    return f"in the diagonals {low} to {high}{whose}"


def _from_diagonal(offset: int) -> str:
    if not offset:
        return ""
    count = "one" if abs(offset) == 1 else str(abs(offset))
    return f"{count} {'above' if offset > 0 else 'below'} the diagonal"


def _flat(place: Place) -> str:
    low, high, size = place.found.low, place.found.high, place.marks.size
    if high == size:
        return f"in the last {size - low} elements in the order of the flattened tensor"
    if low == 0:
        return f"in the first {high} elements in the order of the flattened tensor"
    return f"in the elements {low} to {high - 1} of the flattened tensor"


def _notes(place: Place) -> list[str]:
    notes = []
    if place.kind in {"region", "mostly"}:
        held, size = place.marks.held(place.found)
        density = held / max(1, size)
        if density < _DENSE:
            notes.append(f"{_percent(density)} of that part")
        if held < place.marks.number:
            notes.append(f"{place.marks.number - held} of them elsewhere")
        if not place.is_sure:
            notes.append("its bounds are not certain")
    if place.kind != "nonfinite" and not place.any_finite:
        notes.append("none of them finite")
    return notes


def _unevenness(place: Place, case: Case) -> str:
    """A chi-square test along each axis: whether some slices are wrong more often than others."""
    marks = place.marks
    for axis in range(len(marks.shape)):
        expected = marks.shares(axis) * marks.number
        kept = expected >= 1
        freedom = int(np.count_nonzero(kept)) - 1
        if freedom < 1:
            continue
        apart = np.square(marks.along(axis)[kept] - expected[kept]) / expected[kept]
        if (float(apart.sum()) - freedom) / np.sqrt(2 * freedom) > _UNEVEN_Z:
            unit = _unit(axis, len(marks.shape), case.context.axes)
            return f", in some {unit.many}{unit.along} more than in others"
    return ""


def _unit(axis: int, dimensions: int, names: Sequence[str]) -> _Unit:
    if axis < len(names) and names[axis]:
        name = names[axis]
        return _Unit(name, f"{name}{'es' if name.endswith(('s', 'x', 'ch')) else 's'}")
    if dimensions == 1:
        return _Unit("element", "elements")
    if dimensions == 2:  # noqa: PLR2004
        return _Unit("row", "rows") if axis == 0 else _Unit("column", "columns")
    return _Unit("index", "indices", f" along axis {axis}")


def _amount(number: int, size: int) -> str:
    if number <= _FEW:
        return f"{number} of {size} elements"
    return f"{_percent(number / size)} of the elements"


def _percent(share: float) -> str:
    digits = 3 if share >= 0.995 else 2  # noqa: PLR2004
    shown = f"{100 * share:.{digits}g}"
    return f"{'99.9' if shown == '100' and share < 1 else shown} %"


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    teen = 10 < number % 100 < 14  # noqa: PLR2004
    return f"{number}{'th' if teen else ends.get(number % 10, 'th')}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
