"""How a tensor's dimensions are named and split over ranks, in one line of text.

The language is that of SGLang's dumper::

    b s[cp:zigzag] h[tp] d # dp:=moe_dp ep:replicated

One word per dimension. Brackets name the axes of ranks that it is split over, the outermost first:
`s[cp,sp]`. `zigzag`: rank r of n holds the chunks r and 2n-1-r of 2n. `h[tp:partial]`: the ranks
hold terms of a sum. `h*d` or `(h*d)`: two dimensions in one. `1`: a dimension of that length, to be
left out. After `#`, axes over which the tensor is the same on all ranks, and by which name data
parallelism goes here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Literal, NoReturn

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Dimension", "Dims", "Split", "parse_dims"]

Order = Literal["natural", "zigzag"]

# A name (or names in parentheses), then axes in brackets; earlier releases wrote parentheses there.
_DIMENSION = re.compile(r"(\([^()\[\]#]*\)|[^\s()\[\]#]+)(?:\[([^\[\]#]*)\]|\(([^()#]*)\))?(?!\S)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPACE = re.compile(r"\s*")
_LONGEST = 1000
_SQUEEZED = "1"


@dataclasses.dataclass(frozen=True)
class Split:
    """An axis of ranks that a dimension is split over.

    Attributes:
        axis: `tp`, `cp` and so on.
        order: which chunks a rank holds.
        partial: the ranks hold terms of a sum, each of the full extent.
    """

    axis: str
    order: Order = "natural"
    partial: bool = False


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension.

    Attributes:
        names: several where several dimensions are laid into one; none for one to be left out.
        splits: the outermost first.
    """

    names: tuple[str, ...]
    splits: tuple[Split, ...] = ()

    @property
    def is_squeezed(self) -> bool:
        """Whether it is to be left out."""
        return not self.names


@dataclasses.dataclass(frozen=True)
class Dims:
    """A line of text, understood.

    Attributes:
        text: as it was given.
        data_axis: the axis of ranks that see different samples, of which one holds the tensor.
        replicated: axes over which all ranks hold the same.
    """

    text: str
    dimensions: tuple[Dimension, ...]
    data_axis: str = "dp"
    replicated: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[Split, ...]:
        """All of them, in the order of the text."""
        return tuple(split for dimension in self.dimensions for split in dimension.splits)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the dimensions that are kept."""
        return tuple(one.names for one in self.dimensions if not one.is_squeezed)


@functools.lru_cache(maxsize=4096)
def parse_dims(text: str) -> Dims:
    """Read a line.

    Raises:
        UsageError: it makes no sense; the message points at the place.
    """
    if len(text) > _LONGEST:
        raise UsageError(f"dims of {len(text)} characters: {_LONGEST} are allowed")
    shape, _, rest = text.partition("#")
    dimensions = tuple(_dimensions(text, len(shape)))
    if not dimensions:
        _refuse(text, 0, "no dimension is named: give one word for each, as b s h[tp] d")
    data_axis, replicated = _declared(text, len(text) - len(rest))
    dims = Dims(text, dimensions, data_axis, replicated)
    _check_unique(dims)
    return dims


def _dimensions(text: str, end: int) -> Iterator[Dimension]:
    at = _after_space(text, 0)
    while at < end:
        found = _DIMENSION.match(text, at, end)
        if found is None:
            _refuse(text, at, "this is no dimension: write name, name[axis] or (name*name)[axis]")
        axes = 2 if found[2] is not None else 3
        splits = () if found[axes] is None else tuple(_splits(text, found.start(axes), found[axes]))
        names = _names(text, at, found[1])
        if splits and not names:
            _refuse(text, at, "a dimension of length 1 is split over nothing: write 1")
        yield Dimension(names, splits)
        at = _after_space(text, found.end())


def _names(text: str, at: int, word: str) -> tuple[str, ...]:
    if word == _SQUEEZED:
        return ()
    inner = word[1:-1] if word.startswith("(") else word
    names = tuple(name.strip() for name in inner.split("*"))
    for name in names:
        if not _NAME.fullmatch(name):
            _refuse(text, at, f"{name!r} is no name: take letters, digits and _")
    return names


def _splits(text: str, at: int, inner: str) -> Iterator[Split]:
    for part in inner.split(","):
        begin = at + len(part) - len(part.lstrip())
        axis, _, qualifiers = part.strip().partition(":")
        if not _NAME.fullmatch(axis):
            _refuse(text, begin, f"{axis!r} is no axis: write for example tp")
        yield _qualified(text, begin, axis, [one.strip() for one in qualifiers.split("+")])
        at += len(part) + 1


def _qualified(text: str, at: int, axis: str, qualifiers: list[str]) -> Split:
    split = Split(axis)
    for qualifier in filter(None, qualifiers):
        if qualifier == "partial":
            split = dataclasses.replace(split, partial=True)
        elif qualifier == "zigzag":
            split = dataclasses.replace(split, order="zigzag")
        elif qualifier not in ("natural", "sharded"):
            _refuse(
                text, at, f"{qualifier!r} is none of partial, zigzag, natural and sharded: take one"
            )
    if split.partial and split.order == "zigzag":
        _refuse(text, at, "zigzag is of parts and partial of terms: give one of them")
    return split


def _declared(text: str, at: int) -> tuple[str, tuple[str, ...]]:
    """What follows the #: the name of the data axis, and the replicated ones."""
    data_axis, replicated = "", []
    for found in re.finditer(r"\S+", text[at:]):
        place = at + found.start()
        axis, _, what = found[0].partition(":")
        if what == "replicated" and _NAME.fullmatch(axis):
            replicated.append(axis)
        elif axis == "dp" and what.startswith("=") and _NAME.fullmatch(what[1:]):
            if data_axis:
                _refuse(text, place, f"dp is {data_axis} already: name it once")
            data_axis = what[1:]
        else:
            _refuse(text, place, f"{found[0]!r}: write axis:replicated or dp:=axis")
    return data_axis or "dp", tuple(replicated)


def _check_unique(dims: Dims) -> None:
    names = [name for dimension in dims.dimensions for name in dimension.names]
    axes = [*(split.axis for split in dims.splits), *dims.replicated]
    for what, found in (("dimension", names), ("axis", axes)):
        for name in found:
            if found.count(name) > 1:
                again = list(re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", dims.text))[-1]
                _refuse(
                    dims.text, again.start(), f"the {what} {name!r} is named twice: once will do"
                )


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _refuse(text: str, at: int, why: str) -> NoReturn:
    raise UsageError(f"dims: {why}\n    {text}\n    {' ' * at}^")
