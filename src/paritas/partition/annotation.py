"""The language in which an operator says how it can be split.

`m k+, n k+ -> m n` is a matrix product: inputs, `->`, outputs, each the names of its dimensions.
Dimensions of one name are equally long and are split together. An output that has the name is made
of the parts, one after the other; what an output without it is, the suffix of the name says:

=============  ====================================================================================
`m`            the same on all ranks
`k+`           a term of a sum; also `k+avg`, `k+max`, `k+min`, `k+product`
`h^`, `64`     never split; `_` is never split and may have another length wherever it is written
`*`            as many dimensions as there are; a tensor that has fewer has the last of them
`(h d)`        h times d, which only h can split, d elements at a time; how long they are may be
               told by another dimension or by an argument of that name
`l~1`          a rank needs one element of each neighbour; `l~0:2`: none before, two after its part
`?`            no tensor, or one that every rank has whole
`/`            the same, and its gradient on each rank is already the whole: `? : /`
`1`            of a tensor without dimensions too
`bias=n`       an input that is given by keyword
=============  ====================================================================================

After a colon a tensor says what it does when a dimension is split that it does not have:

=============  ====================================================================================
`l h^ : /m`    input: when m is split, its gradient on each rank is already the whole (`:/` always)
`n : !k`       input: when k is split, one rank has it and the others zeros, as a bias needs it
               (`:!` whenever terms are summed)
`c : @n`       input: when n is split, what the operator writes to it is each rank's own (`:@`
               always): it is reported, and not claimed to be what the whole writes
`a : b+min`    output: this one is reduced otherwise than the suffix says; `a : b` is not reduced
=============  ====================================================================================

After a semicolon, arguments that go with the split (`3` is the fourth one, by position):

=================  ================================================================================
`groups=g`         is as large as g and divided with it; not needed for an argument that is called g
`size[0]=(b s)`    the same for an item of a tuple; -1 stays what it is
`start:stop=n`     begin and end of a rank's part of n
`group=ranks(n)`   when n is split, the process group of the ranks: the operator exchanges with
                   them what it needs, forward and backward; None when something else is split
=================  ================================================================================

So `* k+, n k+, n : !k -> * n` is a linear layer, `*, n+ e -> * e ; start:stop=n` an embedding whose
vocabulary is split, `n c h^ w^, c, c, c, c, 1 -> n c h^ w^ ; process_group=ranks(n)` a batch norm
whose ranks share their statistics. Parts need not be equal; a bracket says of what they are
multiples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from paritas.errors import UsageError
from paritas.partition.grammar import (
    ANY_LENGTH,
    REST_MARK,
    AnnotationSignature,
    Bounds,
    Dim,
    DimFactor,
    Members,
    Number,
    Suffix,
    Tensor,
    parse_signature,
    reduction_of,
)
from paritas.placement.recipes import (
    Divided,
    Group,
    KeywordRule,
    OperatorCall,
    Place,
    Range,
    Recipe,
)
from paritas.results.placements import Once, Partial, Replicate, Role, Shard

# --- Which argument of a call each input is -------------------------------------------------------

Shape = tuple[int, ...]
# An argument, what the annotation says of it, and the shapes of the tensors in it.
Given = tuple[Place, Tensor, tuple[Shape, ...]]


def operator_name(call: OperatorCall) -> str:
    """The last part of the operator's name."""
    name = call.name or getattr(call.function, "__name__", "the operator")
    return str(name).rpartition(".")[2]


def value_at(call: OperatorCall, place: Place, item: int | None = None) -> Any:
    """An argument of the call or an item of it; None where it is not given."""
    if isinstance(place, str):
        value = call.kwargs.get(place)
    else:
        value = call.args[place] if place < len(call.args) else None
    if item is None or value is None:
        return value
    try:
        return value[item]
    except (TypeError, IndexError, KeyError):
        return None


def holds_tensor(value: Any) -> bool:
    """Whether an argument is a tensor, or a list with one in it."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, torch.Tensor) for item in items)


def _shapes(value: Any) -> tuple[Shape, ...]:
    """Of a tensor, of the tensors in a list, of a number (which broadcasts)."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape),)
    if isinstance(value, (list, tuple)):
        return tuple(tuple(item.shape) for item in value if isinstance(item, torch.Tensor))
    return ((),) if isinstance(value, (int, float, complex)) else ()


def given_tensors(
    signature: AnnotationSignature, call: OperatorCall, refuse: Callable[[str], NoReturn]
) -> list[Given]:
    """All positional arguments, whether annotated or not; then the named ones.

    Args:
        refuse: called with the reason where an argument is missing, unannotated or no tensor.
    """
    found: list[Given] = []
    for place, tensor in _pair_arguments(signature, call, refuse):
        value = value_at(call, place)
        shapes = _shapes(value)
        if tensor.dims is not None and not shapes and value is not None:
            what = f"{type(value).__name__} {value!r:.60}"
            refuse(f"argument {place} is {what}, not the tensor `{tensor}`: write `?` for it")
        known = tensor.dims is not None or holds_tensor(value)
        found.append((place, tensor, shapes if known else ()))
    return found


def _pair_arguments(
    signature: AnnotationSignature, call: OperatorCall, refuse: Callable[[str], NoReturn]
) -> list[tuple[Place, Tensor]]:
    positional = [tensor for tensor in signature.inputs if tensor.keyword is None]
    named: list[tuple[Place, Tensor]] = [
        (tensor.keyword, tensor) for tensor in signature.inputs if tensor.keyword is not None
    ]
    if len(positional) > len(call.args):
        hint = "write an input that is given by keyword as `bias=n`"
        refuse(f"{len(positional)} inputs for {len(call.args)} positional arguments; {hint}")
    for at in range(len(positional), len(call.args)):
        if holds_tensor(call.args[at]):
            many = f"{len(positional)} inputs for {len(call.args)} arguments"
            refuse(f"{many}: argument {at} is a tensor; write its dimensions, or `?`")
        positional.append(Tensor(None))
    for name, value in call.kwargs.items():
        if holds_tensor(value) and name not in dict(named):
            refuse(f"argument `{name}` is a tensor: add `{name}=` with its dimensions, or `?`")
    return [*enumerate(positional), *named]


# --- How long the dimensions of an annotation are in a call: measured, told, or left over ---------

# Of `(h d)` only the product can be measured. Each factor has to be known from elsewhere but one.


class Measure(NamedTuple):
    """A dimension, how long it is, and what says so."""

    dim: Dim
    length: int
    where: str


def lengths_of(
    told: list[Measure], measured: list[Measure], refuse: Callable[[str], NoReturn]
) -> dict[str, int]:
    """The lengths of all identifiers that are measured.

    Args:
        told: by arguments: they are what they are.
        measured: of tensors: a length of 1 may be broadcast.
        refuse: called with the reason when they contradict each other or leave one unknown.
    """
    lengths = _Lengths(refuse)
    # What is broadcast speaks last.
    first = [*told, *(each for each in measured if each.length != 1)]
    last = [each for each in measured if each.length == 1]
    lengths.leave_none(lengths.learn(lengths.learn(first) + last))
    return lengths.known


class _Lengths:
    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        self.known: dict[str, int] = {}
        self._said: dict[str, str] = {}
        self._refuse = refuse

    def learn(self, measures: list[Measure]) -> list[Measure]:
        """Learn what can be learned; give back what has more than one unknown factor still."""
        while True:
            later = [measure for measure in measures if not self._settle(measure)]
            if len(later) == len(measures):
                return later
            measures = later

    def leave_none(self, left: list[Measure]) -> None:
        """Refuse what stayed unknown; a product of 1 tells its factors."""
        for dim, length, where in left:
            names = [each.name for each in dim.factors if self._size(each) is None]
            if length == 1:
                self.known |= dict.fromkeys(names, 1)
            elif names:
                hint = f"give one of them as an argument, and write `; argument={names[0]}`"
                both = " and ".join(names)
                self._refuse(f"{where} is {length}, and nothing says how long {both} are: {hint}")

    def _size(self, factor: DimFactor) -> int | None:
        return int(factor.name) if factor.is_number else self.known.get(factor.name)

    def _settle(self, measure: Measure) -> bool:
        """Learn a dimension's last unknown factor; whether nothing is left to learn of it."""
        dim, length, where = measure
        if dim.factors[0].name == ANY_LENGTH:
            return True
        sizes = [self._size(factor) for factor in dim.factors]
        known = prod(size for size in sizes if size is not None)
        unknown = [factor.name for factor in dim.factors if self._size(factor) is None]
        if len(unknown) > 1:
            return False
        if unknown:
            if known == 0 or length % known:
                rest = f"no multiple of {known}, which the rest of `{dim}` is"
                self._refuse(f"{where} is {length}, {rest}")
            self.known[unknown[0]] = length // known
            self._said[unknown[0]] = where
        elif length != known and (length != 1 or all(each.is_number for each in dim.factors)):
            said = "; ".join(
                f"{each.name} is {self.known[each.name]} by {self._said.get(each.name, 'itself')}"
                for each in dim.factors
                if not each.is_number
            )
            self._refuse(
                f"{where} is {length}, not {known} as `{dim}`" + (f" ({said})" * bool(said))
            )
        return True


# --- An annotation laid over one call -------------------------------------------------------------

# `*` becomes as many dimensions as the call has, the factors of brackets are found out, and
# whatever cannot be split in this call is known with the reason.

_ONE = Dim((DimFactor("1"),))


@dataclasses.dataclass(frozen=True)
class AnnotatedOperand:
    """An input or an output of the call.

    Attributes:
        place: which argument; None for an output.
        dims: with `*` written out; None where nothing can be split.
        shapes: of the tensor, or of those in the list; none for an output, which is not there yet.
        tensor: what the annotation says.
    """

    place: Place | None
    dims: tuple[Dim, ...] | None
    shapes: tuple[Shape, ...]
    tensor: Tensor

    @property
    def words(self) -> str:
        """What to call it in a message."""
        if self.place is None:
            return f"output `{self.tensor}`"
        return (
            f"argument {self.place}" if isinstance(self.place, int) else f"argument `{self.place}`"
        )


@dataclasses.dataclass(frozen=True)
class Expansion:
    """An annotation laid over a call.

    Attributes:
        lengths: of the identifiers, as far as they are known: those of outputs alone may not be.
        suffixes: of the identifiers.
        frozen: identifiers that cannot be split, and why.
    """

    signature: AnnotationSignature
    call: OperatorCall
    inputs: tuple[AnnotatedOperand, ...]
    outputs: tuple[AnnotatedOperand, ...]
    lengths: dict[str, int]
    suffixes: dict[str, Suffix]
    frozen: dict[str, str]

    @property
    def operands(self) -> tuple[AnnotatedOperand, ...]:
        """In the order in which an option counts them."""
        return self.inputs + self.outputs

    def first_factor(self, dim: Dim) -> DimFactor:
        """What a dimension is split by: its first factor that is not 1."""
        return _first_factor(dim, self.lengths)


def expand(signature: AnnotationSignature, call: OperatorCall) -> Expansion:
    """Lay an annotation over a call.

    Raises:
        UsageError: they do not fit: ranks, lengths, arguments that are missing.
    """
    return _Expander(signature, call).expansion()


def _first_factor(dim: Dim, lengths: dict[str, int]) -> DimFactor:
    for factor in dim.factors:
        if factor.name != "1" and lengths.get(factor.name) != 1:
            return factor
    return dim.factors[-1]


class _Expander:
    def __init__(self, signature: AnnotationSignature, call: OperatorCall) -> None:
        self._signature = signature
        self._call = call

    def expansion(self) -> Expansion:
        given = given_tensors(self._signature, self._call, self._fail)
        rest = max(
            (self._rest(tensor, shape) for _, tensor, shapes in given for shape in shapes),
            default=0,
        )
        inputs = tuple(
            self._operand(place, tensor, shapes, rest) for place, tensor, shapes in given
        )
        outputs = tuple(self._operand(None, tensor, (), rest) for tensor in self._signature.outputs)
        lengths = self._measure(inputs, outputs)
        inputs = tuple(self._without_broadcast(operand, lengths) for operand in inputs)
        operands = inputs + outputs
        suffixes: dict[str, Suffix] = {}
        for dim in _dims(operands):
            for factor in dim.factors:
                suffixes.setdefault(factor.name, factor.suffix)
        frozen = _frozen(operands, lengths, suffixes)
        return Expansion(self._signature, self._call, inputs, outputs, lengths, suffixes, frozen)

    def _rest(self, tensor: Tensor, shape: Shape) -> int:
        """For how many dimensions `*` stands here."""
        dims = tensor.dims or ()
        return len(shape) - len(dims) + 1 if any(dim.is_rest for dim in dims) else 0

    def _operand(
        self, place: Place | None, tensor: Tensor, shapes: tuple[Shape, ...], rest: int
    ) -> AnnotatedOperand:
        dims = tensor.dims
        if dims is None or (place is not None and not shapes):
            return AnnotatedOperand(place, None, shapes, tensor)
        if dims == (_ONE,) and shapes and not any(shapes):
            dims = ()  # `1` is how a number without dimensions is written too
        own = rest if not shapes else self._rest(Tensor(dims), shapes[0])
        written: list[Dim] = []
        for dim in dims:
            if dim.is_rest:
                # Fewer dimensions are the last ones: so torch broadcasts.
                names = [f"{REST_MARK}{at}" for at in range(rest - own, rest)]
                written += [Dim((DimFactor(name, dim.factors[0].suffix),)) for name in names]
            else:
                written.append(dim)
        operand = AnnotatedOperand(place, tuple(written), shapes, tensor)
        for shape in shapes:
            if len(shape) != len(written):
                least = " or more" if any(dim.is_rest for dim in dims) else ""
                count = len([dim for dim in dims if not dim.is_rest])
                have = f"{len(shape)} dimensions {shape}"
                self._fail(f"{operand.words} has {have}, `{tensor}` has {count}{least}")
        return operand

    def _measure(
        self, inputs: tuple[AnnotatedOperand, ...], outputs: tuple[AnnotatedOperand, ...]
    ) -> dict[str, int]:
        names = {factor.name for dim in _dims(inputs + outputs) for factor in dim.factors}
        told: list[tuple[Dim, Any, str]] = [
            (Dim((DimFactor(name),)), value, f"argument `{name}`")
            for name, value in self._call.kwargs.items()
            if name in names
        ]
        for number in self._signature.numbers:
            if isinstance(number, Number):
                value = value_at(self._call, number.place, number.item)
                told.append((number.dim, value, f"argument `{str(number).partition('=')[0]}`"))
        measured = [
            Measure(dim, length, f"dimension {at} of {operand.words}")
            for operand in inputs
            for shape in operand.shapes
            for at, (dim, length) in enumerate(zip(operand.dims or (), shape, strict=False))
        ]
        # -1 is a size that follows from the others.
        sizes = [Measure(*each) for each in told if type(each[1]) is int and each[1] >= 0]
        return lengths_of(sizes, measured, self._fail)

    def _without_broadcast(
        self, operand: AnnotatedOperand, lengths: dict[str, int]
    ) -> AnnotatedOperand:
        """A dimension of length 1 beside longer ones of its name is the same on all ranks."""
        if operand.dims is None or not operand.shapes:
            return operand
        dims = list(operand.dims)
        for at, dim in enumerate(dims):
            ones = {shape[at] == 1 for shape in operand.shapes}
            if True in ones and any(lengths.get(each.name, 1) != 1 for each in dim.factors):
                if len(ones) > 1:
                    some = "is a list of which only some are 1 long"
                    self._fail(f"{operand.words} {some} at `{dim}`: write `_`")
                dims[at] = _ONE
        return dataclasses.replace(operand, dims=tuple(dims))

    def _fail(self, why: str) -> NoReturn:
        raise UsageError(
            f"`{self._signature}` does not fit this call of {operator_name(self._call)}: {why}"
        )


def _dims(operands: tuple[AnnotatedOperand, ...]) -> Iterator[Dim]:
    for operand in operands:
        yield from operand.dims or ()


def _frozen(
    operands: tuple[AnnotatedOperand, ...], lengths: dict[str, int], suffixes: dict[str, Suffix]
) -> dict[str, str]:
    """The identifiers that cannot be split, and why."""
    why: dict[str, str] = {
        name: "is frozen by `^`" for name, suffix in suffixes.items() if suffix == "^"
    }
    why[ANY_LENGTH] = "is a dimension that is never split"
    for name, length in lengths.items():
        if length <= 1:
            why.setdefault(name, f"has length {length}")
    for operand in operands:
        seen: set[str] = set()
        for dim in operand.dims or ():
            first = _first_factor(dim, lengths)
            for factor in dim.factors:
                if factor.is_number:
                    continue
                if factor.name in seen:
                    why.setdefault(factor.name, f"occurs twice in `{operand.tensor}`")
                seen.add(factor.name)
                if factor != first:
                    why.setdefault(factor.name, f"is not the first factor of `{dim}`")
    return why


# --- What the split of one identifier makes of every argument and every result of a call ----------


class IdentifierSplit:
    """What becomes of a call when one of its identifiers is split."""

    def __init__(self, expansion: Expansion, name: str, ranks: int | None = None) -> None:
        self._expansion = expansion
        self._name = name
        self._ranks = ranks

    def obstacle(self) -> str | None:
        """Why it cannot be split in this call, if it cannot."""
        name, ranks, call = self._name, self._ranks, self._expansion.call
        if name in self._expansion.frozen:
            return f"{name} {self._expansion.frozen[name]}"
        numbers = self.numbers
        sized = [rule for _, rule in numbers if not isinstance(rule, Group)]
        if self._split_argument() is None and not sized:
            return f"no input has {name}, and no argument goes with it"
        length = self._expansion.lengths.get(name)
        if ranks is not None and length is not None and length < ranks:
            return f"{name} has length {length}, too short for {ranks} ranks"
        for place, rule in numbers:
            if isinstance(rule, Group) and (isinstance(place, str) or place < len(call.args)):
                continue  # the ranks are given it, whatever the call has there
            value = value_at(call, place, rule.item if isinstance(rule, Divided) else None)
            if value is None:
                return f"argument {place} goes with {name} and is not given: give it"
            # A number that is a multiple of the length is shared evenly or not at all.
            uneven = ranks is not None and length is not None and length % ranks
            if isinstance(rule, Divided) and value != length and uneven:
                shares = f"{length} for {ranks} ranks is uneven"
                return f"argument {place} is {value} and goes with {name}, and {shares}"
        return None

    @functools.cached_property
    def inputs(self) -> tuple[tuple[Place, Role], ...]:
        """What a rank is given of every tensor among the arguments."""
        call = self._expansion.call
        return tuple(
            (operand.place, self._placement(operand))
            for operand in self._expansion.inputs
            if operand.place is not None and holds_tensor(value_at(call, operand.place))
        )

    @functools.cached_property
    def outputs(self) -> tuple[Role, ...]:
        """How every result is put together."""
        return tuple(map(self._combine, self._expansion.outputs))

    @functools.cached_property
    def numbers(self) -> tuple[tuple[Place, KeywordRule], ...]:
        """The arguments that go with the split."""
        expansion, call = self._expansion, self._expansion.call
        rules: dict[tuple[Place, int | None], KeywordRule] = {}
        value = call.kwargs.get(self._name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            rules[self._name, None] = Divided()
        for number in expansion.signature.numbers:
            if isinstance(number, Bounds):
                of = self._split_argument() if number.name == self._name else None
                if of is not None:
                    rules[number.begin, None] = Range(of, "begin")
                    rules[number.end, None] = Range(of, "end")
            elif isinstance(number, Members):
                joined = self._name in number.names
                if joined or value_at(call, number.place) is not None:
                    rules[number.place, None] = Group(joined)
            elif (
                any(factor.name == self._name for factor in number.dim.factors)
                and value_at(call, number.place, number.item) != -1
            ):
                rules[number.place, number.item] = Divided(number.item)
        return tuple((place, rule) for (place, _), rule in rules.items())

    def _split_argument(self) -> Place | None:
        placements = self.inputs
        return next(
            (place for place, placement in placements if isinstance(placement, Shard)), None
        )

    def _find(self, operand: AnnotatedOperand) -> tuple[int, Dim] | None:
        for at, dim in enumerate(operand.dims or ()):
            if any(factor.name == self._name for factor in dim.factors):
                return at, dim
        return None

    def _placement(self, operand: AnnotatedOperand) -> Role:
        found = self._find(operand)
        if found is not None:
            at, dim = found
            # The identifier is the first factor that is not 1: all others make up one step of it.
            lengths = self._expansion.lengths
            others = [factor for factor in dim.factors if factor.name != self._name]
            unit = prod(int(each.name) if each.is_number else lengths[each.name] for each in others)
            return Shard(at, unit, dim.halo)
        control = operand.tensor.control(self._name)
        if control is not None and control.kind == "!":
            # Without a name it is about every sum: of other results it is no term.
            counted = control.name or self._expansion.suffixes[self._name] == "sum"
            return Once() if counted else Replicate()
        if control is not None and control.kind == "@":
            return Replicate(own=True)
        return Replicate(summed=control is None)

    def _combine(self, operand: AnnotatedOperand) -> Role:
        found = self._find(operand)
        if found is not None:
            return Shard(found[0])
        control = operand.tensor.control(self._name)
        if operand.dims is None and control is None:
            return Replicate()
        suffix = self._expansion.suffixes[self._name] if control is None else control.kind
        reduction = reduction_of(suffix)
        return Replicate() if reduction is None else Partial(reduction)


# The keys of an option, and what each is at least.
_LEAST = {"idx": 0, "dim": 0, "num": 1}


@dataclasses.dataclass(frozen=True)
class Option:
    """A dimension to be split, as a configuration names it.

    Attributes:
        idx: which tensor: the arguments by position, inputs that are given by keyword, the outputs.
        dim: which of its dimensions.
        num: over how many ranks, if that is said with it.
    """

    idx: int
    dim: int
    num: int | None = None

    @classmethod
    def of(cls, mapping: Mapping[str, object]) -> Option:
        """Read `{'idx': 0, 'dim': 1}`; `num` may be there too.

        Raises:
            UsageError: another key, a missing one, or a value that is no whole number.
        """
        given = dict(mapping)
        fault = ""
        for key in ("idx", "dim"):
            if key not in given:
                fault = f"has no key `{key}`"
        for key in given:
            if key not in _LEAST:
                fault = f"has the unknown key {key!r}"
        if fault:
            hint = "write {'idx': 0, 'dim': 1}, with 'num' for a number of ranks"
            raise UsageError(f"partition option {given!r} {fault}: {hint}")
        numbers: dict[str, int] = {}
        for key, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < _LEAST[key]:
                hint = f"give a whole number from {_LEAST[key]} on"
                raise UsageError(f"partition option {given!r}: `{key}` is {value!r}; {hint}")
            numbers[key] = value
        return cls(**numbers)


class CannotSplitError(UsageError):
    """An annotation does not allow a split; `obstacle` says why."""

    def __init__(self, split: str, obstacle: str) -> None:
        super().__init__(split, obstacle)
        self.obstacle = obstacle

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


@dataclasses.dataclass(frozen=True)
class Annotation:
    """How an operator can be split, for any shapes."""

    signature: AnnotationSignature

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Read an annotation.

        Raises:
            UsageError: it is none; a caret shows where.
        """
        if not isinstance(text, str):
            raise UsageError(f"annotation: {text!r:.60} is no text: write `m k+, n k+ -> m n`")
        return _parse(text)

    @functools.cached_property
    def text(self) -> str:
        """The annotation, spelled as every other of its meaning."""
        return str(self.signature)

    def __str__(self) -> str:
        return self.text

    def check(self, call: OperatorCall) -> None:
        """See whether it fits a call: the arguments, their ranks, equal lengths of equal names.

        Raises:
            UsageError: it does not.
        """
        expand(self.signature, call)

    def options(self, call: OperatorCall) -> list[Option]:
        """What can be split in this call: each identifier once, where it occurs first."""
        expansion = expand(self.signature, call)
        found: dict[str, Option] = {}
        for idx, operand in enumerate(expansion.operands):
            for at, dim in enumerate(operand.dims or ()):
                factor = expansion.first_factor(dim)
                if factor.is_number or factor.name in found:
                    continue
                if IdentifierSplit(expansion, factor.name).obstacle() is None:
                    found[factor.name] = Option(idx, at)
        return list(found.values())

    def recipe(self, call: OperatorCall, option: Option) -> Recipe:
        """What a split of this dimension makes of every argument and result.

        Raises:
            UsageError: the dimension is not there or cannot be split.
        """
        expansion = expand(self.signature, call)
        name, obstacle = _named_identifier(expansion, option)
        split = IdentifierSplit(expansion, name, option.num)
        obstacle = obstacle or split.obstacle()
        if obstacle is not None:
            where = f"idx {option.idx}, dim {option.dim} of {operator_name(call)}"
            raise CannotSplitError(f"{where} cannot be split by `{self.text}`", obstacle)
        words = f"{operator_name(call)}: {self.text}, split by {name}"
        return Recipe(split.inputs, split.outputs, split.numbers, words, name)


def _named_identifier(expansion: Expansion, option: Option) -> tuple[str, str | None]:
    """The identifier an option names; or why there is none."""
    operands = expansion.operands
    if not 0 <= option.idx < len(operands):
        counts = f"{len(expansion.inputs)} inputs and {len(expansion.outputs)} outputs"
        return "", f"there are {counts}, so that idx is 0 to {len(operands) - 1}"
    operand = operands[option.idx]
    if operand.dims is None:
        return "", f"{operand.words} is no tensor, or one that is never split"
    if not 0 <= option.dim < len(operand.dims):
        return "", f"{operand.words} has {len(operand.dims)} dimensions, counted from 0"
    factor = expansion.first_factor(operand.dims[option.dim])
    if factor.is_number:
        return "", f"dimension {option.dim} of {operand.words} has the fixed length {factor.name}"
    return factor.name, None


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Annotation:
    return Annotation(parse_signature(text))
