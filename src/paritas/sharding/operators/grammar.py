"""The grammar of annotations: tokens, the parsed form and its spelling, and the parser."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, get_args

from paritas.core.errors import UsageError
from paritas.core.results.items import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.operators.calls import Place


# --- The parsed form, and its spelling ------------------------------------------------------------

# `annotation` describes the language. `str()` of each part is its canonical spelling.

# `*`, and the name of a dimension that may have another length at each place.
REST = "*"
ANY_LENGTH = "_"
# The dimensions that `*` stands for in a call are named `*0`, `*1`, ..., unlike any identifier.
REST_MARK = "*"

# What results without an identifier are when it is split: replicated, or terms of a reduction.
# `^`: it is never split.
Suffix = Literal["", "^"] | Reduction
# The marks of an input after its colon.
InputMark = Literal["/", "!", "@"]
INPUT_MARKS: tuple[InputMark, ...] = get_args(InputMark)


_REDUCTION_MARKS: dict[str, Reduction] = {name: name for name in get_args(Reduction)}


def reduction_of(suffix: str) -> Reduction | None:
    """The reduction of a suffix, if it has one."""
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
        """Whether it is a fixed length, which is never split."""
        return self.name.isdecimal()

    def __str__(self) -> str:
        return self.name + _spell_suffix(self.suffix)


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension: a factor, or the product of several.

    Attributes:
        halo: elements of the neighbours that a rank needs before and after its own part.
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
        kind: for an input, `/` (its gradient is not reduced), `!` (counted once) or `@` (each rank
            writes its own value to it); for an output, a suffix that applies to it alone.
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
        dims: None for `?`: not a tensor, or one that is replicated.
        keyword: the name of a keyword argument.
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
        """Its control for a split by this identifier; a named control wins over an unnamed one."""
        fitting = [control for control in self.controls if control.name in ("", name)]
        return max(fitting, key=lambda control: len(control.name), default=None)


@dataclasses.dataclass(frozen=True)
class Number:
    """An argument, or an item of one, that is the length of a dimension and is divided with it."""

    place: Place
    item: int | None
    dim: Dim

    @property
    def argument(self) -> str:
        """The argument or item, as in an annotation."""
        return str(self.place) if self.item is None else f"{self.place}[{self.item}]"

    def __str__(self) -> str:
        return f"{self.argument}={self.dim}"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Two arguments that are the start and end of a rank's part of a dimension."""

    begin: Place
    end: Place
    name: str

    def __str__(self) -> str:
        return f"{self.begin}:{self.end}={self.name}"


@dataclasses.dataclass(frozen=True)
class Members:
    """An argument that is the process group of the ranks when one of these names is split."""

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


# --- Tokens ---------------------------------------------------------------------------------------

# A suffix with the name of its reduction is one token, and so is a halo with its numbers.
_TOKEN = re.compile(r"->|\w+|\+\w*|~\w*(?::\w+)?|[*?/^():;,=!@\[\]]| |(?P<wrong>.)")


@dataclasses.dataclass(frozen=True)
class AnnotationToken:
    """A token and its position; the last one is empty."""

    text: str
    begin: int

    @property
    def is_word(self) -> bool:
        """Whether it is a name or a number."""
        return self.text.replace("_", "a").isalnum()


class Tokens:
    """The tokens of a text, and a position in them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._cut()
        self._at = 0

    def _cut(self) -> list[AnnotationToken]:
        tokens = []
        for match in _TOKEN.finditer(self._text):
            token = AnnotationToken(match[0], match.start())
            if match["wrong"] is not None:
                self.fail(f"unexpected character `{token.text}`", token)
            if token.text != " ":
                tokens.append(token)
        return [*tokens, AnnotationToken("", len(self._text))]

    def peek(self, ahead: int) -> AnnotationToken:
        """A token further on."""
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    @property
    def next(self) -> AnnotationToken:
        """The next token."""
        return self.peek(0)

    @property
    def glued(self) -> bool:
        """Whether there is no space before the next token."""
        return self._at > 0 and self._text[self.next.begin - 1] != " "

    def step(self) -> AnnotationToken:
        """Read the next token."""
        token = self.next
        self._at += 1
        return token

    def take(self, text: str, hint: str) -> None:
        """Read a required token."""
        if self.next.text != text:
            self.fail(f"`{text}` is missing: {hint}")
        self.step()

    def identifier(self) -> str:
        """Read a name."""
        token = self.next
        if not token.text.isidentifier():
            what = f"`{token.text}`" if token.text else "the end"
            self.fail(f"expected a name (letters, digits and `_`, not a digit first), got {what}")
        return self.step().text

    def fail(self, why: str, token: AnnotationToken | None = None) -> NoReturn:
        """Raise an error that shows the annotation with a caret under a token, or the next one."""
        begin = (token or self.next).begin
        raise UsageError(f"annotation: {why}\n  {self._text}\n  {' ' * begin}^")


# --- The parser -----------------------------------------------------------------------------------

_HALO = re.compile(r"~(\d+)(?::(\d+))?")
# `prod` is torch's name.
_REDUCTIONS: dict[str, Reduction] = {name: name for name in get_args(Reduction)} | {
    "": "sum",
    "prod": "product",
}
# The word for the process group of the ranks; a dimension may also have this name.
_RANKS = "ranks"
_Item = TypeVar("_Item")
_Side = Literal["input", "output"]


def parse_signature(text: str) -> AnnotationSignature:
    """Parse an annotation.

    Raises:
        UsageError: it is not valid; the message shows where, and what to write.
    """
    return _AnnotationParser(" ".join(text.split())).signature()


class _AnnotationParser(Tokens):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        # The first factor with each name.
        self._inputs: dict[str, DimFactor] = {}
        self._outputs: dict[str, DimFactor] = {}
        self._keywords: list[str] = []
        self._mentions: list[tuple[str, AnnotationToken]] = []

    def signature(self) -> AnnotationSignature:
        inputs = self._many("->", lambda: self._tensor("input")) if self.next.text != "->" else ()
        self.take("->", "write the inputs, `->`, the outputs: `m k+, n k+ -> m n`")
        outputs = self._many(";", lambda: self._tensor("output"))
        numbers: tuple[Number | Bounds | Members, ...] = ()
        if self.next.text == ";":
            self.step()
            numbers = self._many("", self._number)
        if self.next.text:
            self.fail(f"unexpected `{self.next.text}`")
        for name, token in self._mentions:
            if name not in self._inputs and name not in self._outputs:
                self.fail(f"no tensor has a dimension `{name}`", token)
        return AnnotationSignature(inputs, outputs, numbers)

    # --- tensors ----------------------------------------------------------------------------------

    def _tensor(self, side: _Side) -> Tensor:
        keyword = None
        if self.next.is_word and self.peek(1).text == "=":
            if side == "output":
                self.fail("an output has no name: write only its dimensions")
            token = self.next
            keyword = self.identifier()
            self.step()
            if keyword in self._keywords:
                self.fail(f"there are two inputs named `{keyword}`: remove one", token)
            self._keywords.append(keyword)
        elif side == "input" and self._keywords:
            self.fail("positional inputs must come before keyword inputs")
        begin = self.next
        dims: tuple[Dim, ...] | None = None
        controls: tuple[Control, ...] = ()
        if begin.text == "?":
            self.step()
        elif begin.text == "/" and side == "input":
            self.step()
            return Tensor(None, (Control("/"),), keyword)
        else:
            dims = self._dims(side)
        if self.next.text == ":":
            names = {factor.name for dim in dims or () for factor in dim.factors}
            controls = self._controls(side, names)
        return Tensor(dims, controls, keyword)

    def _dims(self, side: _Side) -> tuple[Dim, ...]:
        dims: list[Dim] = []
        while self.next.is_word or self.next.text in ("*", "("):
            begin = self.next
            dim = self._dim(side)
            if dim.is_rest and any(other.is_rest for other in dims):
                self.fail("a tensor can have only one `*`: name the other dimensions", begin)
            if dim.is_rest and side == "output" and REST not in self._inputs:
                self.fail("`*` must also be in an input, or name the dimensions", begin)
            dims.append(dim)
        if not dims:
            what = "not a tensor or not split" if side == "input" else "not a tensor"
            self.fail(
                f"the dimensions of an {side} are missing: write them, `1` for a single number, or "
                f"`?` if it is {what}"
            )
        return tuple(dims)

    def _dim(self, side: _Side | None) -> Dim:
        """A dimension; `side` is None where it only repeats a dimension of the tensors."""
        begin = self.next
        factors: tuple[DimFactor, ...]
        if begin.text == "(":
            self.step()
            inner: list[DimFactor] = []
            while self.next.text != ")":
                token = self.next
                inner.append(self._factor(side))
                if inner[-1].name in (REST, ANY_LENGTH):
                    self.fail(f"`{token.text}` cannot be a factor: use a name", token)
            self.step()
            if not inner:
                self.fail(
                    "the brackets are empty: write the factors of the dimension, such as `(h d)`",
                    begin,
                )
            factors = tuple(inner)
            if self.next.text[:1] in ("+", "^") and self.glued:
                self.fail(
                    "brackets cannot have a suffix: put it on an identifier, such as `(h+ d)`"
                )
        else:
            factors = (self._factor(side),)
        return Dim(factors, self._halo(side, factors))

    def _factor(self, side: _Side | None) -> DimFactor:
        token = self.next
        if token.text == REST and side is not None:
            self.step()
            name = REST
        elif token.text.isdecimal():
            self.step()
            name = str(int(token.text))
        else:
            name = self.identifier()
        suffix: Suffix = ""
        if self.next.text[:1] in ("+", "^"):
            if not self.glued:
                self.fail(f"there is a space before the suffix: write `{name}{self.next.text}`")
            suffix = self._suffix()
        factor = DimFactor(name, suffix)
        if name.isdecimal():
            if suffix not in ("", "^"):
                self.fail(f"a number is never split: write `{name}` or a name", token)
            return DimFactor(name)
        if name == ANY_LENGTH:
            if suffix not in ("", "^"):
                self.fail("`_` is never split: use a name", token)
            return DimFactor(name)
        if side is None:
            self._mentions.append((name, token))
        else:
            self._agree(side, factor, token)
        return factor

    def _agree(self, side: _Side, factor: DimFactor, token: AnnotationToken) -> None:
        """Check that an identifier has the same suffix in all inputs; outputs may omit it."""
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
            before = "not in any input" if first is None else f"`{first}` before"
            self.fail(
                f"`{factor}` here, but {before}: spell an identifier the same everywhere", token
            )

    def _halo(self, side: _Side | None, factors: tuple[DimFactor, ...]) -> tuple[int, int]:
        token = self.next
        if not token.text.startswith("~"):
            return 0, 0
        match = _HALO.fullmatch(token.text)
        if match is None:
            self.fail(
                f"`{token.text}` is not a halo: write `~1`, or `~0:2` for none before and two after"
            )
        if side != "input" or factors[0].name in (REST, ANY_LENGTH) or factors[0].is_number:
            self.fail("only a named dimension of an input can have a halo")
        self.step()
        return int(match[1]), int(match[2] or match[1])

    def _controls(self, side: _Side, own_names: set[str]) -> tuple[Control, ...]:
        self.step()
        controls: list[Control] = []
        while self.next.text not in (",", "->", ";", ""):
            mark = self.next
            if side == "input":
                kind = self._input_mark()
                name = self.identifier() if self.next.is_word else ""
                controls.append(Control(kind, name))
            else:
                name = self.identifier()
                suffix: Suffix = self._suffix() if self.next.text.startswith("+") else ""
                controls.append(Control(suffix, name))
            if name in own_names:
                self.fail(
                    f"this {side} has the dimension `{name}` itself and is split with it", mark
                )
            if name:
                self._mentions.append((name, mark))
            if [control.name for control in controls].count(name) > 1:
                self.fail(f"there are two marks for a split by `{name or 'any'}`: remove one", mark)
        if not controls:
            self.fail("nothing after the colon: write `/m`, `!k`, `@n`, or remove it")
        return tuple(controls)

    def _input_mark(self) -> InputMark:
        mark = self.next
        input_mark = next(
            (known_mark for known_mark in INPUT_MARKS if mark.text == known_mark), None
        )
        if input_mark is None:
            self.fail(
                f"`{mark.text}` is not a mark of an input: write `/m` (gradient not reduced when m "
                "is split), `!k` (counted once) or `@n` (each rank writes its own value)"
            )
        self.step()
        return input_mark

    # --- numbers ----------------------------------------------------------------------------------

    def _number(self) -> Number | Bounds | Members:
        argument_place = self._place()
        item = None
        if self.next.text == ":":
            self.step()
            end = self._place()
            self.take("=", "write `start:stop=n`")
            token = self.next
            name = self.identifier()
            self._mentions.append((name, token))
            return Bounds(argument_place, end, name)
        if self.next.text == "[":
            self.step()
            token = self.step()
            if not token.text.isdecimal():
                self.fail("write the position of the item: `size[0]=b`", token)
            item = int(token.text)
            self.take("]", "write the position of the item: `size[0]=b`")
        self.take("=", "write the argument, `=`, and the dimension of that length: `heads=h`")
        if item is None and self.next.text == _RANKS and self.peek(1).text == "(":
            return Members(argument_place, self._members())
        return Number(argument_place, item, self._dim(None))

    def _members(self) -> tuple[str, ...]:
        """The names in `ranks(n)`."""
        self.step()
        self.step()
        names: list[str] = []
        while self.next.text != ")":
            token = self.next
            names.append(self.identifier())
            self._mentions.append((names[-1], token))
        if not names:
            self.fail("the dimension is missing: write `process_group=ranks(n)`")
        self.step()
        return tuple(names)

    def _place(self) -> Place:
        if self.next.text.isdecimal():
            return int(self.step().text)
        return self.identifier()

    # --- parts ------------------------------------------------------------------------------------

    def _suffix(self) -> Suffix:
        token = self.next
        if token.text == "^":
            self.step()
            return "^"
        name = token.text[1:]
        if name not in _REDUCTIONS:
            known_suffixes = ", ".join(
                f"`+{each}`" for each in ("", "avg", "max", "min", "product")
            )
            self.fail(
                f"`+{name}` is not a reduction: write {known_suffixes}, then a space before "
                "a dimension"
            )
        self.step()
        return _REDUCTIONS[name]

    def _many(self, end: str, read: Callable[[], _Item]) -> tuple[_Item, ...]:
        parsed_elements = [read()]
        while self.next.text == ",":
            self.step()
            parsed_elements.append(read())
        if self.next.text not in (end, "", "->"):
            self.fail(f"unexpected `{self.next.text}`: separate tensors with a comma")
        return tuple(parsed_elements)
