"""The grammar of annotations: what they say, as data, and how they are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, get_args

from paritas.errors import UsageError
from paritas.results.placements import Reduction

if TYPE_CHECKING:
    from paritas.placement.recipes import Place

# --- The words of an annotation, one after the other, and the caret under the one that is wrong ---

# A suffix with the reduction it names and a halo with its numbers are one word each.
_TOKEN = re.compile(r"->|\w+|\+\w*|~\w*(?::\w+)?|[*?/^():;,=!@\[\]]")


@dataclasses.dataclass(frozen=True)
class AnnotationToken:
    """A word, and where it begins; an empty one at the end."""

    text: str
    begin: int

    @property
    def is_word(self) -> bool:
        """Whether it is a name or a number."""
        return self.text.replace("_", "a").isalnum()


class Tokens:
    """The words of a text, read from the front."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._cut()
        self._at = 0

    def _cut(self) -> list[AnnotationToken]:
        tokens, at = [], 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is not None:
                tokens.append(AnnotationToken(match[0], at))
                at = match.end()
            elif self._text[at] == " ":
                at += 1
            else:
                self.fail(
                    AnnotationToken(self._text[at], at),
                    f"`{self._text[at]}` is no part of an annotation",
                )
        return [*tokens, AnnotationToken("", len(self._text))]

    def peek(self, ahead: int) -> AnnotationToken:
        """A word further on."""
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    @property
    def next(self) -> AnnotationToken:
        """The word that is read next."""
        return self.peek(0)

    @property
    def glued(self) -> bool:
        """Whether no space is before it."""
        return self._at > 0 and self._text[self.next.begin - 1] != " "

    def step(self) -> AnnotationToken:
        """Read it."""
        token = self.next
        self._at += 1
        return token

    def take(self, text: str, hint: str) -> None:
        """Read a word that has to be there."""
        if self.next.text != text:
            self.fail(self.next, f"`{text}` is missing: {hint}")
        self.step()

    def identifier(self) -> str:
        """Read a name."""
        token = self.next
        if not token.text.isidentifier():
            what = f"`{token.text}`" if token.text else "the end"
            self.fail(token, f"{what} where a name is due: letters, digits and `_`, no digit first")
        return self.step().text

    def fail(self, token: AnnotationToken, why: str) -> NoReturn:
        """Show the annotation with a caret."""
        raise UsageError(f"annotation: {why}\n  {self._text}\n  {' ' * token.begin}^")


# --- What an annotation says, as data, and how it is spelled --------------------------------------

# `annotation` describes the language; here are its parts, each of which writes itself in the one
# spelling that parsing gives back.

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


_REDUCTION_MARKS: dict[str, Reduction] = {name: name for name in get_args(Reduction)}


def reduction_of(suffix: str) -> Reduction | None:
    """The reduction a suffix stands for, if it stands for one."""
    return _REDUCTION_MARKS.get(suffix)


def _spell_suffix(suffix: str) -> str:
    if suffix in ("", "^"):
        return suffix
    return "+" if suffix == "sum" else f"+{suffix}"


@dataclasses.dataclass(frozen=True)
class DimFactor:
    """An identifier, a number or `*`."""

    name: str
    suffix: Suffix = ""

    @property
    def is_number(self) -> bool:
        """Whether it is a length that is written down: never split."""
        return self.name.isdecimal()

    def __str__(self) -> str:
        return self.name + _spell_suffix(self.suffix)


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension: a factor, or the product of several.

    Attributes:
        halo: elements of its neighbours that a rank needs before and after its own part.
    """

    factors: tuple[DimFactor, ...]
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
        return kind + self.name if kind in INPUT_MARKS else self.name + _spell_suffix(kind)


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
class AnnotationSignature:
    """A whole annotation."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    numbers: tuple[Number | Bounds | Members, ...] = ()

    def __str__(self) -> str:
        inputs, outputs, numbers = (
            ", ".join(map(str, part)) for part in (self.inputs, self.outputs, self.numbers)
        )
        return f"{inputs} -> {outputs}".lstrip() + (f" ; {numbers}" if numbers else "")

    def factors(self) -> Iterator[DimFactor]:
        """All factors of all tensors."""
        for tensor in self.inputs + self.outputs:
            for dim in tensor.dims or ():
                yield from dim.factors


# --- Reads an annotation; what it cannot read it shows, with a caret under the fault --------------

_HALO = re.compile(r"~(\d+)(?::(\d+))?")
# The second name is how torch calls it.
_REDUCTIONS: dict[str, Reduction] = {name: name for name in get_args(Reduction)} | {
    "": "sum",
    "prod": "product",
}
# The word for the process group of the ranks; a dimension may be called so too.
_RANKS = "ranks"
_Item = TypeVar("_Item")
_Side = Literal["input", "output"]


def parse_signature(text: str) -> AnnotationSignature:
    """Read an annotation.

    Raises:
        UsageError: it is none; the message shows where, and what to write.
    """
    return _AnnotationParser(" ".join(text.split())).signature()


class _AnnotationParser:
    def __init__(self, text: str) -> None:
        self._tokens = Tokens(text)
        # Where each identifier was first written in an input, and how.
        self._inputs: dict[str, DimFactor] = {}
        self._outputs: dict[str, DimFactor] = {}
        self._keywords: list[str] = []
        self._mentions: list[tuple[str, AnnotationToken]] = []

    def signature(self) -> AnnotationSignature:
        inputs = (
            self._many("->", lambda: self._tensor("input"))
            if self._tokens.next.text != "->"
            else ()
        )
        self._tokens.take("->", "write the inputs, `->`, the outputs: `m k+, n k+ -> m n`")
        outputs = self._many(";", lambda: self._tensor("output"))
        numbers: tuple[Number | Bounds | Members, ...] = ()
        if self._tokens.next.text == ";":
            self._tokens.step()
            numbers = self._many("", self._number)
        if self._tokens.next.text:
            self._tokens.fail(self._tokens.next, f"`{self._tokens.next.text}` cannot stand here")
        for name, token in self._mentions:
            if name not in self._inputs and name not in self._outputs:
                self._tokens.fail(
                    token,
                    f"no tensor has the dimension `{name}`: name one that is there",
                )
        return AnnotationSignature(inputs, outputs, numbers)

    # --- tensors ----------------------------------------------------------------------------------

    def _tensor(self, side: _Side) -> Tensor:
        keyword = None
        if self._tokens.next.is_word and self._tokens.peek(1).text == "=":
            if side == "output":
                self._tokens.fail(
                    self._tokens.next, "an output has no name: write its dimensions alone"
                )
            token = self._tokens.next
            keyword = self._tokens.identifier()
            self._tokens.step()
            if keyword in self._keywords:
                self._tokens.fail(token, f"the second input that is called `{keyword}`: leave one")
            self._keywords.append(keyword)
        elif side == "input" and self._keywords:
            hint = "inputs by position stand before those with a name"
            self._tokens.fail(self._tokens.next, hint)
        begin = self._tokens.next
        dims: tuple[Dim, ...] | None = None
        controls: tuple[Control, ...] = ()
        if begin.text == "?":
            self._tokens.step()
        elif begin.text == "/" and side == "input":
            self._tokens.step()
            return Tensor(None, (Control("/"),), keyword)
        else:
            dims = self._dims(side)
        if self._tokens.next.text == ":":
            own = {factor.name for dim in dims or () for factor in dim.factors}
            controls = self._controls(side, own)
        return Tensor(dims, controls, keyword)

    def _dims(self, side: _Side) -> tuple[Dim, ...]:
        dims: list[Dim] = []
        while self._tokens.next.is_word or self._tokens.next.text in ("*", "("):
            begin = self._tokens.next
            dim = self._dim(side)
            if dim.is_rest and any(other.is_rest for other in dims):
                self._tokens.fail(begin, "a tensor has one `*` at most: name the other dimensions")
            if dim.is_rest and side == "output" and REST not in self._inputs:
                self._tokens.fail(
                    begin,
                    "no input has `*`, which would say how many dimensions it is: name them",
                )
            dims.append(dim)
        if not dims:
            what = "`1` for a single number, `?` for what is no tensor" + (
                " or not split" if side == "input" else ""
            )
            self._tokens.fail(
                self._tokens.next, f"the dimensions of an {side} are missing: write them, {what}"
            )
        return tuple(dims)

    def _dim(self, side: _Side | None) -> Dim:
        """A dimension; of no side where it only repeats what the tensors say."""
        begin = self._tokens.next
        factors: tuple[DimFactor, ...]
        if begin.text == "(":
            self._tokens.step()
            inner: list[DimFactor] = []
            while self._tokens.next.text != ")":
                token = self._tokens.next
                inner.append(self._factor(side))
                if inner[-1].name in (REST, ANY_LENGTH):
                    self._tokens.fail(token, f"`{token.text}` cannot be a factor: name it")
            self._tokens.step()
            if not inner:
                self._tokens.fail(
                    begin, "an empty bracket: write the factors of the dimension, such as `(h d)`"
                )
            factors = tuple(inner)
            if self._tokens.next.text[:1] in ("+", "^") and self._tokens.glued:
                self._tokens.fail(
                    self._tokens.next,
                    "a bracket has no suffix: write it to the identifiers, such as `(h+ d)`",
                )
        else:
            factors = (self._factor(side),)
        return Dim(factors, self._halo(side, factors))

    def _factor(self, side: _Side | None) -> DimFactor:
        token = self._tokens.next
        if token.text == REST and side is not None:
            self._tokens.step()
            name = REST
        elif token.text.isdecimal():
            self._tokens.step()
            name = str(int(token.text))
        else:
            name = self._tokens.identifier()
        suffix: Suffix = ""
        if self._tokens.next.text[:1] in ("+", "^"):
            if not self._tokens.glued:
                wrong = self._tokens.next
                why = f"a suffix follows its dimension without a space: `{name}{wrong.text}`"
                self._tokens.fail(wrong, why)
            suffix = self._suffix()
        factor = DimFactor(name, suffix)
        if name.isdecimal():
            if suffix not in ("", "^"):
                self._tokens.fail(
                    token, f"a number is never split: write `{name}`, or a name instead of it"
                )
            return DimFactor(name)
        if name == ANY_LENGTH:
            if suffix not in ("", "^"):
                self._tokens.fail(token, "`_` is never split: give it a name")
            return DimFactor(name)
        if side is None:
            self._mentions.append((name, token))
        else:
            self._agree(side, factor, token)
        return factor

    def _agree(self, side: _Side, factor: DimFactor, token: AnnotationToken) -> None:
        """The suffix of an identifier is the same at all inputs; an output may leave it out."""
        first = self._inputs.get(factor.name)
        if side == "input":
            self._inputs.setdefault(factor.name, factor)
            wrong = first is not None and first.suffix != factor.suffix
        else:
            self._outputs.setdefault(factor.name, factor)
            wrong = (
                factor.suffix not in ("", "^")
                if first is None
                else factor.suffix not in ("", first.suffix)
            )
        if wrong:
            before = "in no input" if first is None else f"`{first}` before"
            self._tokens.fail(
                token, f"`{factor}` here, {before}: write an identifier alike everywhere"
            )

    def _halo(self, side: _Side | None, factors: tuple[DimFactor, ...]) -> tuple[int, int]:
        token = self._tokens.next
        if not token.text.startswith("~"):
            return 0, 0
        match = _HALO.fullmatch(token.text)
        if match is None:
            self._tokens.fail(
                token,
                f"`{token.text}` is no halo: write `~1`, or `~0:2` for none before and two after",
            )
        if side != "input" or factors[0].name in (REST, ANY_LENGTH) or factors[0].is_number:
            self._tokens.fail(token, "a halo belongs to a named dimension of an input")
        self._tokens.step()
        return int(match[1]), int(match[2] or match[1])

    def _controls(self, side: _Side, own: set[str]) -> tuple[Control, ...]:
        self._tokens.step()
        controls: list[Control] = []
        while self._tokens.next.text not in (",", "->", ";", ""):
            mark = self._tokens.next
            if side == "input":
                kind = self._input_mark()
                name = self._tokens.identifier() if self._tokens.next.is_word else ""
                controls.append(Control(kind, name))
            else:
                name = self._tokens.identifier()
                suffix: Suffix = self._suffix() if self._tokens.next.text.startswith("+") else ""
                controls.append(Control(suffix, name))
            if name in own:
                self._tokens.fail(
                    mark, f"this {side} has the dimension `{name}` itself, and is split with it"
                )
            if name:
                self._mentions.append((name, mark))
            if [control.name for control in controls].count(name) > 1:
                self._tokens.fail(
                    mark, f"the second word about a split by `{name or 'any'}`: leave one"
                )
        if not controls:
            self._tokens.fail(
                self._tokens.next,
                "nothing after the colon: write `/m`, `!k`, `@n`, or leave the colon out",
            )
        return tuple(controls)

    def _input_mark(self) -> InputMark:
        mark = self._tokens.next
        found = next((known for known in INPUT_MARKS if mark.text == known), None)
        if found is None:
            wanted = (
                "`/m` (gradient not reduced when m is split), `!k` (counted once) or `@n` (what is "
                "written to it is each rank's own)"
            )
            self._tokens.fail(mark, f"`{mark.text}` says nothing about an input: write {wanted}")
        self._tokens.step()
        return found

    # --- numbers ----------------------------------------------------------------------------------

    def _number(self) -> Number | Bounds | Members:
        place = self._place()
        item = None
        if self._tokens.next.text == ":":
            self._tokens.step()
            end = self._place()
            self._tokens.take("=", "write `start:stop=n`")
            token = self._tokens.next
            name = self._tokens.identifier()
            self._mentions.append((name, token))
            return Bounds(place, end, name)
        if self._tokens.next.text == "[":
            self._tokens.step()
            token = self._tokens.step()
            if not token.text.isdecimal():
                self._tokens.fail(token, "write the position of the item: `size[0]=b`")
            item = int(token.text)
            self._tokens.take("]", "write the position of the item: `size[0]=b`")
        self._tokens.take(
            "=", "write the argument, `=`, and the dimension it is the length of: `heads=h`"
        )
        if item is None and self._tokens.next.text == _RANKS and self._tokens.peek(1).text == "(":
            return Members(place, self._members())
        return Number(place, item, self._dim(None))

    def _members(self) -> tuple[str, ...]:
        """`ranks(n)`: the dimensions whose ranks are meant."""
        self._tokens.step()
        self._tokens.step()
        names: list[str] = []
        while self._tokens.next.text != ")":
            token = self._tokens.next
            names.append(self._tokens.identifier())
            self._mentions.append((names[-1], token))
        if not names:
            self._tokens.fail(self._tokens.next, "whose ranks? write `process_group=ranks(n)`")
        self._tokens.step()
        return tuple(names)

    def _place(self) -> Place:
        if self._tokens.next.text.isdecimal():
            return int(self._tokens.step().text)
        return self._tokens.identifier()

    # --- parts ------------------------------------------------------------------------------------

    def _suffix(self) -> Suffix:
        token = self._tokens.next
        if token.text == "^":
            self._tokens.step()
            return "^"
        name = token.text[1:]
        if name not in _REDUCTIONS:
            known = ", ".join(f"`+{each}`" for each in ("", "avg", "max", "min", "product"))
            self._tokens.fail(
                token,
                f"`+{name}` is no reduction: write {known}, and a space before the next dimension",
            )
        self._tokens.step()
        return _REDUCTIONS[name]

    def _many(self, end: str, read: Callable[[], _Item]) -> tuple[_Item, ...]:
        found = [read()]
        while self._tokens.next.text == ",":
            self._tokens.step()
            found.append(read())
        if self._tokens.next.text not in (end, "", "->"):
            self._tokens.fail(
                self._tokens.next,
                f"`{self._tokens.next.text}` cannot stand here: between tensors stands a comma",
            )
        return tuple(found)
