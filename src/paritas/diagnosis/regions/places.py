"""A region that was found, as data, and what kind of region it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paritas.diagnosis.regions.spans import TILES, Bools, Span

if TYPE_CHECKING:
    from paritas.diagnosis.regions.coordinates import Coordinate
    from paritas.diagnosis.regions.marks import Marked
    from paritas.diagnosis.regions.searching import Found

__all__ = ["Place", "index_text", "rank_of", "tail_of"]

_LISTED_BORDER = 3
_DIAGONALS = {
    "index": "diagonal",
    "above": "above diagonal",
    "below": "below diagonal",
    "range": "band",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where the wrong elements are.

    Attributes:
        kind: `region`, `mostly` a region, `everywhere`, `nonfinite` or `scatter`.
        found: the region.
        marks: the wrong elements.
        seen: the elements by which the region was found: those and smaller errors.
        any_finite: whether any of the wrong elements is a number, in the candidate.
    """

    kind: str
    found: Found
    marks: Marked
    seen: Marked
    any_finite: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.marks.shape

    @property
    def limits(self) -> list[tuple[Coordinate, Span]]:
        """The coordinates that say something."""
        pairs = zip(self.found.coordinates, self.found.spans, strict=True)
        return [(coordinate, span) for coordinate, span in pairs if span.kind != "all"]

    @property
    def is_sure(self) -> bool:
        """Whether the bounds are certain: a slice more or less would have shown."""
        density = min(1.0, self.seen.number / max(self.found.size, 1.0))
        for _, span in self.limits:
            each = self.found.size / max(1, span.number)
            bounded = span.kind in {"range", "above", "below", "border", "tiles"}
            if bounded and (1 - density) ** each > 0.01:  # noqa: PLR2004
                return False
        return True

    def elements(self) -> Bools:
        """The region as a mask; all elements where it is none."""
        return self.found.elements(self.shape)

    def named(self, world: Mapping[str, int]) -> str:
        """The kind of the region, as people call it."""
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


def rank_of(span: Span, size: int, world: Mapping[str, int]) -> tuple[int, int, str, int] | None:
    """First and last rank whose parts a span is, the mesh axis, and how many ranks it has."""
    for name, ranks in world.items():
        if span.kind not in {"index", "range"} or ranks < 2 or size % ranks:  # noqa: PLR2004
            continue
        part = size // ranks
        if span.start % part == 0 and span.stop % part == 0:
            return span.start // part, span.stop // part - 1, name, ranks
    return None


def tail_of(span: Span, size: int) -> str:
    """Which tile's tail a span is, in words; empty if it is none."""
    if span.kind not in {"index", "range"} or span.stop != size or span.start == 0:
        return ""
    for tile in reversed(TILES):
        if size > tile and size % tile and span.start == size // tile * tile:
            return f"the tail behind the last whole tile of {tile}"
        if size > tile and size % tile == 0 and size - span.start == tile:
            return f"the last tile of {tile}"
    return ""


def index_text(place: Place) -> str:
    """The region as an index expression; empty where there is none."""
    if place.kind not in {"region", "mostly"} or place.found.kind != "product":
        return ""
    tokens = []
    for coordinate, span in zip(place.found.coordinates, place.found.spans, strict=True):
        token = _token(span, place.shape[coordinate.axes[0]]) if coordinate.name == "axis" else ""
        if not token:
            return ""
        tokens.append(token)
    if sum(token.startswith("[") for token in tokens) > 1:
        return ""  # two lists would be taken in step, and not as a product
    return f"[{', '.join(tokens)}]"


def _token(span: Span, size: int) -> str:
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
