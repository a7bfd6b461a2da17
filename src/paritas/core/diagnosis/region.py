"""Where a tensor is wrong: the simplest region that the evidence supports, as data and in words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from paritas.core.diagnosis.marks import TILES, Bools, IndexSpan, bits_of_choice
from paritas.core.diagnosis.search import (
    CaseSurvey,
    Description,
    shortest_description,
    single_element,
    whole_tensor,
)
from paritas.core.results.findings import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paritas.core.diagnosis.case import Case
    from paritas.core.diagnosis.marks import Marks
    from paritas.core.diagnosis.search import Coordinate


# --- Finding the region ---------------------------------------------------------------------------

# A region is reported if it saves this many bits; by chance that happens once in 2 to this power.
_MARGIN = 7.0
# Everything is wrong if this share of it is.
_NEARLY_ALL = 0.9
# Or if it would be without values that are equal by chance.
_CHANCE = 1.3
# If a fault is not beyond its limit everywhere, smaller errors show how far it reaches. Errors
# beyond this z are not noise.
_LEVELS = (6.0, 3.0, 1.5, 0.5)
_NO_NOISE_Z = 3.0
_OFF_SHARE = 0.4
# If nothing is beyond the limit, no structure is claimed below this: noise looks like that.
_LEAST_Z = 4.0
# A description by smaller errors may cost this much more than one by the judge's limit, since large
# errors are rarely spread evenly.
_SLACK = 16.0
_SLACK_SHARE = 1.05
# Most of a tensor is not a region if a smaller share of it than this is wrong.
_THIN = 0.3
# A part is wrong among stray errors if it is this many times as often wrong as the rest.
_OFTEN = 8.0


def find_region(case: Case, survey: CaseSurvey | None = None) -> Region | None:
    """The simplest region that holds what is wrong; None if nothing is.

    It holds all wrong elements, unless its sentence says how many are elsewhere.
    """
    position = find_place(case, survey)
    return None if position is None else describe_region(position, case)


def find_place(case: Case, survey: CaseSurvey | None = None) -> WrongPlace | None:
    """The same as data, which can list its elements."""
    survey = survey or CaseSurvey(case)
    marks = survey.base
    if not marks.number:
        return None
    if marks.number == marks.size:
        wrong_place = WrongPlace("everywhere", whole_tensor(marks), marks, marks)
    elif not case.is_exact and not survey.reaches(_LEAST_Z):
        wrong_place = WrongPlace("scatter", whole_tensor(marks), marks, marks)
    else:
        wrong_place = _find(survey, marks, _shards(case))
    return dataclasses.replace(wrong_place, any_finite=survey.any_finite)


def _find(survey: CaseSurvey, marks: Marks, shards: tuple[int, ...]) -> WrongPlace:
    best = single_element(marks) if marks.number == 1 else _shortest(survey, marks, shards)
    visited, everywhere = marks, False
    if not survey.case.is_exact:
        best, visited, everywhere = _look_closer(survey, best, shards)
    pays = not everywhere and _pays(best, visited)
    if pays and _density(best, visited) >= _NEARLY_ALL:
        return WrongPlace("region", best, marks, visited)
    if everywhere or (not pays and _is_everywhere(survey)):
        return WrongPlace("everywhere", whole_tensor(marks), marks, marks)
    among = _among_strays(marks, shards, best.cost(marks.number))
    if among is not None:
        return WrongPlace("mostly", among, marks, marks)
    if pays or marks.number == 1:
        return WrongPlace("region", best, marks, visited)
    return WrongPlace(
        "nonfinite" if survey.are_lost() else "scatter", whole_tensor(marks), marks, marks
    )


def _shards(case: Case) -> tuple[int, ...]:
    """Sizes that a rank's shard can have."""
    sizes = {
        size // world
        for world in case.context.world.values()
        for size in case.shape
        if world > 1 and size % world == 0 and size > world
    }
    return tuple(sorted(sizes))


def _shortest(survey: CaseSurvey, marks: Marks, shards: tuple[int, ...]) -> Description:
    return shortest_description(marks, shards, survey.marked_out(marks))


def _density(description: Description, marks: Marks) -> float:
    return marks.number / max(description.size, marks.number)


def _pays(description: Description, marks: Marks) -> bool:
    saved = whole_tensor(marks).cost(marks.number) - description.cost(marks.number)
    thin = _density(description, marks) < _THIN and 2 * description.size > marks.total
    return not description.is_all and not thin and saved >= _MARGIN


def _look_closer(
    survey: CaseSurvey, best: Description, shards: tuple[int, ...]
) -> tuple[Description, Marks, bool]:
    """The region that smaller errors show, these errors, and whether everything is wrong."""
    base = survey.base
    visited = base
    many_off = survey.share_beyond(_NO_NOISE_Z) >= _OFF_SHARE
    densest = _density(best, base) if _pays(best, base) else 0.0
    plainly_all = not densest and base.number >= _NEARLY_ALL * base.total
    if plainly_all or (densest >= _DENSE and not survey.share_beyond(_LEVELS[0])):
        return best, visited, plainly_all
    for level, marks in _levels(survey):
        closer = _shortest(survey, marks, shards)
        density = _density(closer, marks)
        dear = closer.cost(base.number) > _SLACK_SHARE * best.cost(base.number) + _SLACK
        if _pays(closer, marks) and density >= min(densest, _DENSE) and not dear:
            best, visited, densest = closer, marks, density
        if densest >= _DENSE and level <= _NO_NOISE_Z:
            break
    return best, visited, many_off and densest < _DENSE


def _levels(survey: CaseSurvey) -> Iterator[tuple[float, Marks]]:
    """Lower and lower levels, while each adds elements and right ones are left."""
    number = survey.base.number
    for level in (*_LEVELS, 0.0):
        marks = survey.beyond(level) if level else survey.differing()
        if marks.number >= marks.total:
            return
        if marks.number > number:
            number = marks.number
            yield level, marks


def _is_everywhere(survey: CaseSurvey) -> bool:
    marks = survey.base
    wrong = marks.number / max(1, marks.total)
    if wrong >= _NEARLY_ALL:
        return True
    return 1 - wrong <= _CHANCE * survey.chance_of_equality()


def _among_strays(marks: Marks, shards: tuple[int, ...], cost_known: float) -> Description | None:
    """A region that is wrong far more often than the rest, which has stray errors."""
    best, saved = None, 2 * _MARGIN
    for axis in range(len(marks.shape)):
        counts, sizes = marks.along(axis), marks.shares(axis) * marks.total
        often = counts / np.maximum(sizes, 1.0)
        hot = often > often.max() / 3
        inside, outside = float(sizes[hot].sum()), float(sizes[~hot].sum())
        marked_hot = int(counts[hot].sum())
        strays = marks.number - marked_hot
        if not 0 < strays < marked_hot or marked_hot * outside < _OFTEN * strays * inside:
            continue
        inner_description = shortest_description(marks.within(axis, hot), shards)
        cost = inner_description.cost(marked_hot) + bits_of_choice(
            marks.total - inner_description.size, strays
        )
        if not inner_description.is_all and cost_known - cost > saved:
            best, saved = inner_description, cost_known - cost
    return best


# --- A region as data -----------------------------------------------------------------------------

_LISTED_BORDER = 3
_DIAGONALS = {
    "index": "diagonal",
    "above": "above diagonal",
    "below": "below diagonal",
    "range": "band",
}


@dataclasses.dataclass(frozen=True, eq=False)
class WrongPlace:
    """Where the wrong elements are.

    Attributes:
        kind: `region`, `mostly` a region, `everywhere`, `nonfinite` or `scatter`.
        found: the region.
        marks: the wrong elements.
        seen: the elements by which the region was found: the wrong ones and smaller errors.
        any_finite: whether any wrong element is finite in the candidate.
    """

    kind: str
    found: Description
    marks: Marks
    seen: Marks
    any_finite: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.marks.shape

    @property
    def limits(self) -> list[tuple[Coordinate, IndexSpan]]:
        """The coordinates that limit the region."""
        pairs = zip(self.found.coordinates, self.found.spans, strict=True)
        return [(coordinate, span) for coordinate, span in pairs if span.kind != "all"]

    @property
    def is_sure(self) -> bool:
        """Whether the bounds are certain: one slice more or less would have shown."""
        density = min(1.0, self.seen.number / max(self.found.size, 1.0))
        for _, span in self.limits:
            each = self.found.size / max(1, span.number)
            bounded = span.kind in {"range", "above", "below", "border", "tiles"}
            if bounded and (1 - density) ** each > 0.01:  # noqa: PLR2004
                return False
        return True

    def elements(self) -> Bools:
        """The region as a mask; all elements if there is no region."""
        out = np.zeros(self.marks.size, dtype=np.bool_)
        for box, mask in self.marks.walk():
            region = np.broadcast_to(self.found.elements_in(box), mask.shape)
            out[box.offset : box.offset + box.size] = region.reshape(-1)
        return out.reshape(self.shape)

    def name_kind(self, world: Mapping[str, int]) -> str:
        """The kind of the region."""
        if self.kind in {"everywhere", "nonfinite", "scatter"}:
            return self.kind
        if self.found.kind != "product":
            return self.found.kind
        for coordinate, span in self.limits:
            if coordinate.name == "diagonal":
                return _DIAGONALS[span.kind]
            if coordinate.name == "frame" or span.kind in {"border", "tiles"}:
                return "border"
        return self._named_by_axes(world)

    def _named_by_axes(self, world: Mapping[str, int]) -> str:
        if any(span.kind == "stride" for _, span in self.limits):
            return "stride"
        if len(self.limits) > 1:
            return "slices"
        coordinate, span = self.limits[0]
        size = self.shape[coordinate.axes[0]]
        if rank_of(span, size, world):
            return "rank"
        if tail_of(span, size):
            return "tile tail"
        return "row" if span.kind == "index" else "slices"


def rank_of(
    span: IndexSpan, size: int, world: Mapping[str, int]
) -> tuple[int, int, str, int] | None:
    """First and last rank whose shards a span is, the mesh axis, and its number of ranks."""
    for name, ranks in world.items():
        if span.kind not in {"index", "range"} or ranks < 2 or size % ranks:  # noqa: PLR2004
            continue
        part = size // ranks
        if span.start % part == 0 and span.stop % part == 0:
            return span.start // part, span.stop // part - 1, name, ranks
    return None


def tail_of(span: IndexSpan, size: int) -> str:
    """Which tile's tail a span is, in words; empty if it is not a tail."""
    if span.kind not in {"index", "range"} or span.stop != size or span.start == 0:
        return ""
    for tile in reversed(TILES):
        if size > tile and size % tile and span.start == size // tile * tile:
            return f"the tail after the last full tile of {tile}"
        if size > tile and size % tile == 0 and size - span.start == tile:
            return f"the last tile of {tile}"
    return ""


def index_text(wrong_place: WrongPlace) -> str:
    """The region as an index expression; empty if there is none."""
    if wrong_place.kind not in {"region", "mostly"} or wrong_place.found.kind != "product":
        return ""
    tokens = []
    for coordinate, span in zip(
        wrong_place.found.coordinates, wrong_place.found.spans, strict=True
    ):
        token = (
            _index_token(span, wrong_place.shape[coordinate.axes[0]])
            if coordinate.name == "axis"
            else ""
        )
        if not token:
            return ""
        tokens.append(token)
    if sum(token.startswith("[") for token in tokens) > 1:
        return ""  # two lists would be indexed in parallel, not as a product
    return f"[{', '.join(tokens)}]"


def _index_token(span: IndexSpan, size: int) -> str:
    match span.kind:
        case "all":
            return ":"
        case "index":
            return str(span.start)
        case "range":
            return f"{span.start or ''}:{'' if span.stop == size else span.stop}"
        case "stride":
            stop = "" if span.stop == size else span.stop
            return f"{span.start or ''}:{stop}:{span.step}"
        case "list":
            return str(list(span.values))
        case "border" if span.width <= _LISTED_BORDER:
            width = span.width
            return str([*range(width), *range(-width, 0)])
    return ""


# --- A region in words ----------------------------------------------------------------------------

_DENSE = 0.95
_FEW = 3
_PLAINLY = 0.5
_MOST = 0.8
_UNEVEN_Z = 8.0


@dataclasses.dataclass(frozen=True)
class _AxisUnit:
    """The words for the indices of an axis."""

    one: str
    many: str
    along: str = ""


def describe_region(wrong_place: WrongPlace, case: Case) -> Region:
    """The region as it is reported."""
    number, size = wrong_place.marks.number, wrong_place.marks.size
    phrase = _phrase(wrong_place, case)
    indexed = index_text(wrong_place) or ("[...]" if wrong_place.kind == "everywhere" else "")
    amount = _describe_amount(number, size)
    if _is_thin(wrong_place):
        amount += " by more than the limit, the others by less"
    notes = [amount, *_notes(wrong_place)]
    mostly = "mostly " if wrong_place.kind == "mostly" else ""
    return Region(
        kind=wrong_place.name_kind(case.context.world),
        text=indexed or phrase,
        elements=number,
        share=number / size,
        sentence=f"{mostly}{phrase} ({', '.join(notes)})",
        axes=_limiting_axes(wrong_place),
    )


def _is_thin(wrong_place: WrongPlace) -> bool:
    """Whether everything is wrong, but most of it by less than its limit."""
    return (
        wrong_place.kind == "everywhere"
        and wrong_place.marks.number < _PLAINLY * wrong_place.marks.total
    )


def _limiting_axes(wrong_place: WrongPlace) -> tuple[int, ...]:
    if wrong_place.kind not in {"region", "mostly"} or wrong_place.found.kind != "product":
        return ()
    return tuple(sorted({axis for coordinate, _ in wrong_place.limits for axis in coordinate.axes}))


def _phrase(wrong_place: WrongPlace, case: Case) -> str:
    match wrong_place.kind:
        case "everywhere":
            if wrong_place.marks.hides:
                return "everywhere except where the reference is zero"
            is_most = wrong_place.marks.number >= _MOST * wrong_place.marks.size
            return "everywhere" if is_most or _is_thin(wrong_place) else "all over the tensor"
        case "scatter":
            return f"scattered{_unevenness(wrong_place, case)}"
        case "nonfinite":
            side = "reference" if wrong_place.any_finite else "candidate"
            return f"only where the {side} is not finite"
    match wrong_place.found.kind:
        case "flat":
            return _describe_flat(wrong_place)
        case "zeros":
            return "only where the reference is zero"
        case "padding":
            axis = wrong_place.found.axis
            return f"in the padding, where the reference stays the same to the end of axis {axis}"
    return _product(wrong_place, case)


def _product(wrong_place: WrongPlace, case: Case) -> str:
    inside = [
        _axis_phrase(coordinate.axes[0], span, wrong_place, case)
        for coordinate, span in wrong_place.limits
        if coordinate.name == "axis"
    ]
    boxed = f"in {_join_words(inside)}" if inside else ""
    for coordinate, span in wrong_place.limits:
        if coordinate.name != "axis":
            pair = _pair_phrase(coordinate, span, len(wrong_place.shape))
            return f"{pair}, {boxed}" if boxed else pair
    return boxed


def _axis_phrase(axis: int, span: IndexSpan, wrong_place: WrongPlace, case: Case) -> str:
    size, unit = (
        wrong_place.shape[axis],
        _axis_unit(axis, len(wrong_place.shape), case.context.axes),
    )
    ranks = rank_of(span, size, case.context.world)
    plain = _span_phrase(span, size, unit)
    if ranks:
        first, last, mesh, number = ranks
        who = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"the shard of {who} of {number} along {mesh}, {plain}"
    tail = tail_of(span, size)
    return f"{plain}, {tail}" if tail else plain


def _span_phrase(span: IndexSpan, size: int, unit: _AxisUnit) -> str:
    many = f"{size} {unit.many}{unit.along}"
    match span.kind:
        case "index":
            return f"{unit.one} {span.start} of {size}{unit.along}"
        case "range" if span.start == 0:
            return _describe_end("first", "last", span.stop, size, many)
        case "range" if span.stop == size:
            return _describe_end("last", "first", size - span.start, size, many)
        case "range":
            return f"{unit.many} {span.start} to {span.stop - 1} of {size}{unit.along}"
        case "stride":
            bounds = "" if span.stop == size else f" to {span.stop - 1}"
            return f"every {_ordinal(span.step)} of {many}, from {span.start}{bounds}"
        case "list":
            names = _join_words([str(value) for value in span.values])
            return f"{unit.many} {names} of {size}{unit.along}"
        case "border":
            return f"the first and the last {_count_unless_one(span.width)}of {many}"
    side = ("first", "last", "first and the last")[span.start]
    return f"the {side} {_count_unless_one(span.width)}of every {span.step} of {many}"


def _describe_end(side: str, other: str, number: int, size: int, many: str) -> str:
    residual = size - number
    if 4 * residual <= number:
        return f"all but the {other} {_count_unless_one(residual)}of {many}"
    return f"the {side} {_count_unless_one(number)}of {many}"


def _count_unless_one(number: int) -> str:
    return "" if number == 1 else f"{number} "


def _pair_phrase(coordinate: Coordinate, span: IndexSpan, dimensions: int) -> str:
    first, second = coordinate.axes
    whose = "" if dimensions == 2 else f" of axes {first} and {second}"  # noqa: PLR2004
    if coordinate.name == "frame":
        rim = f"the outermost {span.width}" if span.width > 1 else "the outermost row and column"
        tile = coordinate.tile
        around = f" of each tile of {tile} x {tile}" if tile else ""
        return f"on the border: {rim} on each side{around}{whose}"
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


def _describe_flat(wrong_place: WrongPlace) -> str:
    low, high, size = wrong_place.found.low, wrong_place.found.high, wrong_place.marks.size
    if high == size:
        return f"in the last {size - low} elements of the flattened tensor"
    if low == 0:
        return f"in the first {high} elements of the flattened tensor"
    return f"in the elements {low} to {high - 1} of the flattened tensor"


def _notes(wrong_place: WrongPlace) -> list[str]:
    notes = []
    if wrong_place.kind in {"region", "mostly"}:
        marked_number, size = wrong_place.marks.count_elements(wrong_place.found)
        density = marked_number / max(1, size)
        if density < _DENSE:
            notes.append(f"{_percent(density)} of that part")
        if marked_number < wrong_place.marks.number:
            notes.append(f"{wrong_place.marks.number - marked_number} of them elsewhere")
        if not wrong_place.is_sure:
            notes.append("its bounds are uncertain")
    if wrong_place.kind != "nonfinite" and not wrong_place.any_finite:
        notes.append("none of them finite")
    return notes


def _unevenness(wrong_place: WrongPlace, case: Case) -> str:
    """A chi-square test along each axis: whether some slices are wrong more often than others."""
    marks = wrong_place.marks
    for axis in range(len(marks.shape)):
        expected = marks.shares(axis) * marks.number
        is_enough = expected >= 1
        freedom = int(np.count_nonzero(is_enough)) - 1
        if freedom < 1:
            continue
        apart = np.square(marks.along(axis)[is_enough] - expected[is_enough]) / expected[is_enough]
        if (float(apart.sum()) - freedom) / np.sqrt(2 * freedom) > _UNEVEN_Z:
            unit = _axis_unit(axis, len(marks.shape), case.context.axes)
            return f", in some {unit.many}{unit.along} more than in others"
    return ""


def _axis_unit(axis: int, dimensions: int, names: Sequence[str]) -> _AxisUnit:
    if axis < len(names) and names[axis]:
        name = names[axis]
        return _AxisUnit(name, f"{name}{'es' if name.endswith(('s', 'x', 'ch')) else 's'}")
    if dimensions == 1:
        return _AxisUnit("element", "elements")
    if dimensions == 2:  # noqa: PLR2004
        return _AxisUnit("row", "rows") if axis == 0 else _AxisUnit("column", "columns")
    return _AxisUnit("index", "indices", f" along axis {axis}")


def _describe_amount(number: int, size: int) -> str:
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


def _join_words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
