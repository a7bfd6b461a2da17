"""What an annotation says, as data, and how it is spelled.

`annotation` describes the language; here are its parts, each of which writes itself in the one
spelling that parsing gives back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from paritas.partition.recipes import Place, Reduction

__all__ = [
    "ANY_LENGTH",
    "INPUT_MARKS",
    "REST",
    "REST_MARK",
    "Bounds",
    "Control",
    "Dim",
    "Factor",
    "InputMark",
    "Members",
    "Number",
    "Signature",
    "Suffix",
    "Tensor",
    "reduction_of",
]

# `*`, and the name of a dimension that may have another length at each place.
REST = "*"
ANY_LENGTH = "_"
# The dimensions that `*` stands for in a call are called `*0`, `*1`, ...: no identifier looks so.
REST_MARK = "*"

# What results without an identifier are when it is split: all alike, or terms of a reduction; `^`:
# it is never split.
Suffix = Literal["", "^"] | Reduction
# What an input says after its colon.
InputMark = Literal["/", "!", "@"]
INPUT_MARKS: tuple[InputMark, ...] = get_args(InputMark)


_REDUCTIONS: dict[str, Reduction] = {name: name for name in get_args(Reduction)}


def reduction_of(suffix: str) -> Reduction | None:
    """The reduction a suffix stands for, if it stands for one."""
    return _REDUCTIONS.get(suffix)


def _spell(suffix: str) -> str:
    if suffix in ("", "^"):
        return suffix
    return "+" if suffix == "sum" else f"+{suffix}"


@dataclasses.dataclass(frozen=True)
class Factor:
    """An identifier, a number or `*`."""

    name: str
    suffix: Suffix = ""

    @property
    def is_number(self) -> bool:
        """Whether it is a length that is written down: never split."""
        return self.name.isdecimal()

    def __str__(self) -> str:
        return self.name + _spell(self.suffix)


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension: a factor, or the product of several.

    Attributes:
        halo: elements of its neighbours that a rank needs before and after its own part.
    """

    factors: tuple[Factor, ...]
    halo: tuple[int, int] = (0, 0)

    @property
    def is_rest(self) -> bool:
        """Whether it is `*`."""
        return self.factors[0].name == REST

    def __str__(self) -> str:
        inner = " ".join(map(str, self.factors))
        before, after = self.halo
        halo = (
            "" if self.halo == (0, 0) else f"~{before}" if before == after else f"~{before}:{after}"
        )
        return (f"({inner})" if len(self.factors) > 1 else inner) + halo


@dataclasses.dataclass(frozen=True)
class Control:
    """What a tensor does when an identifier is split that it does not have itself.

    Attributes:
        kind: of an input `/` (its gradient is not reduced), `!` (counted once) or `@` (what is
            written to it is each rank's own); of an output the suffix that holds for it alone.
        name: the identifier; empty for all of them.
    """

    kind: InputMark | Suffix
    name: str = ""

    def __str__(self) -> str:
        kind = self.kind
        return kind + self.name if kind in INPUT_MARKS else self.name + _spell(kind)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or an output.

    Attributes:
        dims: None for `?`: no tensor, or one that every rank has whole.
        keyword: the name of the argument, where it is given by name.
    """

    dims: tuple[Dim, ...] | None
    controls: tuple[Control, ...] = ()
    keyword: str | None = None

    def __str__(self) -> str:
        name = "" if self.keyword is None else f"{self.keyword}="
        if self.dims is None and self.controls == (Control("/"),):
            return f"{name}/"
        shape = "?" if self.dims is None else " ".join(map(str, self.dims))
        return name + " : ".join(
            [shape, *([" ".join(map(str, self.controls))] if self.controls else [])]
        )

    def control(self, name: str) -> Control | None:
        """What is said of it for a split by this identifier; the more special word wins."""
        fitting = [control for control in self.controls if control.name in ("", name)]
        return max(fitting, key=lambda control: len(control.name), default=None)


@dataclasses.dataclass(frozen=True)
class Number:
    """An argument, or an item of one, that is as large as a dimension and is divided with it."""

    place: Place
    item: int | None
    dim: Dim

    def __str__(self) -> str:
        item = "" if self.item is None else f"[{self.item}]"
        return f"{self.place}{item}={self.dim}"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Two arguments that say where a rank's part of a dimension begins and ends."""

    begin: Place
    end: Place
    name: str

    def __str__(self) -> str:
        return f"{self.begin}:{self.end}={self.name}"


@dataclasses.dataclass(frozen=True)
class Members:
    """An argument that is the process group of the ranks where one of these names is split."""

    place: Place
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}=ranks({' '.join(self.names)})"


@dataclasses.dataclass(frozen=True)
class Signature:
    """A whole annotation."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    numbers: tuple[Number | Bounds | Members, ...] = ()

    def __str__(self) -> str:
        inputs, outputs, numbers = (
            ", ".join(map(str, part)) for part in (self.inputs, self.outputs, self.numbers)
        )
        return f"{inputs} -> {outputs}".lstrip() + (f" ; {numbers}" if numbers else "")

    def factors(self) -> Iterator[Factor]:
        """All factors of all tensors."""
        for tensor in self.inputs + self.outputs:
            for dim in tensor.dims or ():
                yield from dim.factors
