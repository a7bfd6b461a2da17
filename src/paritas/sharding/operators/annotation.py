"""The language that describes how an operator can be split.

`m k+, n k+ -> m n` is a matrix product: the inputs, `->`, the outputs, each as the names of its
dimensions. Dimensions with the same name have the same length and are split together. If an output
has the name, its parts are concatenated. If not, the suffix of the name says what the output is:

=============  ====================================================================================
`m`            replicated on all ranks
`k+`           a term of a sum; also `k+avg`, `k+max`, `k+min`, `k+product`
`h^`, `64`     never split; `_` is never split and may have another length wherever it is written
`*`            any number of dimensions; a tensor with fewer of them has the last ones
`(h d)`        h times d, which only h can split, d elements at a time; their lengths come from
               another dimension or from an argument with that name
`l~1`          a rank needs one element of each neighbour; `l~0:2`: none before, two after its part
`?`            not a tensor, or a replicated one
`/`            the same, and its gradient on each rank is already complete: `? : /`
`1`            also a tensor without dimensions
`bias=n`       a keyword argument
=============  ====================================================================================

After a colon, a tensor says what it does when a dimension is split that it does not have:

=============  ====================================================================================
`l h^ : /m`    input: when m is split, its gradient on each rank is already complete (`:/` always)
`n : !k`       input: when k is split, one rank has it and the others have zeros, as a bias needs
               (`:!` whenever terms are summed)
`c : @n`       input: when n is split, each rank writes its own value to it (`:@` always); this is
               reported, but need not equal what the whole writes
`a : b+min`    output: this one is reduced differently than the suffix says; `a : b`: not reduced
=============  ====================================================================================

After a semicolon, arguments that change with the split (`3` is the fourth positional one):

=================  ================================================================================
`groups=g`         is the length g and is divided with it; not needed for an argument named g
`size[0]=(b s)`    the same for an item of a tuple; -1 stays -1
`start:stop=n`     start and end of a rank's part of n
`group=ranks(n)`   when n is split, the process group of the ranks, with which the operator
                   communicates forward and backward; None when something else is split
=================  ================================================================================

For example, `* k+, n k+, n : !k -> * n` is a linear layer, `*, n+ e -> * e ; start:stop=n` an
embedding with a split vocabulary, and `n c h^ w^, c, c, c, c, 1 -> n c h^ w^ ;
process_group=ranks(n)` a batch norm whose ranks share their statistics. Parts need not be equal;
with brackets, they are multiples of the other factors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from paritas.core.errors import UsageError
from paritas.core.placement.placement import Divided, Group, KeywordRule, Range, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Role, Shard
from paritas.sharding.operators.grammar import (
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

if TYPE_CHECKING:
    from paritas.core.operators.calls import OperatorCall, Place

# --- An annotation applied to a call --------------------------------------------------------------

# `*` becomes as many dimensions as the call has, the lengths of all factors are determined, and
# each identifier that cannot be split in this call gets a reason.

Shape = tuple[int, ...]
_ONE = Dim((DimFactor("1"),))


def operator_name(call: OperatorCall) -> str:
    """The last part of the operator's name."""
    name = call.name or getattr(call.function, "__name__", "the operator")
    return str(name).rpartition(".")[2]


def value_at(call: OperatorCall, argument_place: Place, item: int | None = None) -> Any:
    """An argument of the call, or an item of it; None if it is not given."""
    if isinstance(argument_place, str):
        value = call.kwargs.get(argument_place)
    else:
        value = call.args[argument_place] if argument_place < len(call.args) else None
    if item is None or value is None:
        return value
    try:
        return value[item]
    except (TypeError, IndexError, KeyError):
        return None


def holds_tensor(value: Any) -> bool:
    """Whether an argument is a tensor or a list that contains one."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, torch.Tensor) for item in items)


def _shapes(value: Any) -> tuple[Shape, ...]:
    """The shapes of a tensor, of the tensors in a list, or of a number (which broadcasts)."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape),)
    if isinstance(value, (list, tuple)):
        return tuple(tuple(item.shape) for item in value if isinstance(item, torch.Tensor))
    return ((),) if isinstance(value, (int, float, complex)) else ()


@dataclasses.dataclass(frozen=True)
class AnnotatedOperand:
    """An input or an output of the call.

    Attributes:
        place: the argument; None for an output.
        dims: with `*` expanded; None if nothing can be split.
        shapes: of the tensor, or of the tensors in the list; empty for an output.
        tensor: its annotation.
    """

    place: Place | None
    dims: tuple[Dim, ...] | None
    shapes: tuple[Shape, ...]
    tensor: Tensor

    @property
    def words(self) -> str:
        """Its name in messages."""
        if self.place is None:
            return f"output `{self.tensor}`"
        return (
            f"argument {self.place}" if isinstance(self.place, int) else f"argument `{self.place}`"
        )


@dataclasses.dataclass(frozen=True)
class Expansion:
    """An annotation applied to a call.

    Attributes:
        lengths: of the identifiers; those that only outputs have may be missing.
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
        """Inputs and outputs in the order in which an option counts them."""
        return self.inputs + self.outputs

    def first_factor(self, dim: Dim) -> DimFactor:
        """The factor that splits a dimension: the first one that is not 1."""
        return _first_factor(dim, self.lengths)


def expand(signature: AnnotationSignature, call: OperatorCall) -> Expansion:
    """Apply an annotation to a call.

    Raises:
        UsageError: they do not fit: numbers of dimensions, lengths, missing arguments.
    """
    return _Expander(signature, call).expansion()


def _first_factor(dim: Dim, lengths: dict[str, int]) -> DimFactor:
    for factor in dim.factors:
        if factor.name != "1" and lengths.get(factor.name) != 1:
            return factor
    return dim.factors[-1]


class _Measure(NamedTuple):
    """A dimension, its length, and the source of the length."""

    dim: Dim
    length: int
    where: str


class _Expander:
    def __init__(self, signature: AnnotationSignature, call: OperatorCall) -> None:
        self._signature = signature
        self._call = call
        # The lengths of identifiers, and where they come from.
        self._lengths: dict[str, int] = {}
        self._sources: dict[str, str] = {}

    def expansion(self) -> Expansion:
        annotated_inputs = [
            (argument_place, tensor, self._shapes_at(argument_place, tensor))
            for argument_place, tensor in self._pairs()
        ]
        rest = max(
            (
                _rest_count(tensor, shape)
                for _, tensor, shapes in annotated_inputs
                for shape in shapes
            ),
            default=0,
        )
        inputs = tuple(
            self._operand(argument_place, tensor, shapes, rest)
            for argument_place, tensor, shapes in annotated_inputs
        )
        outputs = tuple(self._operand(None, tensor, (), rest) for tensor in self._signature.outputs)
        self._learn_lengths(inputs, outputs)
        inputs = tuple(map(self._without_broadcast, inputs))
        operands = inputs + outputs
        suffixes: dict[str, Suffix] = {}
        for dim in _dims(operands):
            for factor in dim.factors:
                suffixes.setdefault(factor.name, factor.suffix)
        frozen = _frozen(operands, self._lengths, suffixes)
        return Expansion(
            self._signature, self._call, inputs, outputs, self._lengths, suffixes, frozen
        )

    # --- arguments --------------------------------------------------------------------------------

    def _pairs(self) -> list[tuple[Place, Tensor]]:
        """All positional arguments, annotated or not, then the annotated keyword arguments."""
        args = self._call.args
        positional = [tensor for tensor in self._signature.inputs if tensor.keyword is None]
        named: list[tuple[Place, Tensor]] = [
            (tensor.keyword, tensor)
            for tensor in self._signature.inputs
            if tensor.keyword is not None
        ]
        if len(positional) > len(args):
            hint = "write a keyword argument as `bias=n`"
            self._fail(f"{len(positional)} inputs for {len(args)} positional arguments; {hint}")
        for at in range(len(positional), len(args)):
            if holds_tensor(args[at]):
                many = f"{len(positional)} inputs for {len(args)} arguments"
                self._fail(f"{many}: argument {at} is a tensor; write its dimensions, or `?`")
            positional.append(Tensor(None))
        for name, value in self._call.kwargs.items():
            if holds_tensor(value) and name not in dict(named):
                self._fail(
                    f"argument `{name}` is a tensor: add `{name}=` with its dimensions, or `?`"
                )
        return [*enumerate(positional), *named]

    def _shapes_at(self, argument_place: Place, tensor: Tensor) -> tuple[Shape, ...]:
        value = value_at(self._call, argument_place)
        shapes = _shapes(value)
        if tensor.dims is None:
            return shapes if holds_tensor(value) else ()
        if not shapes and value is not None:
            what = f"{type(value).__name__} {value!r:.60}"
            self._fail(
                f"argument {argument_place} is {what}, not a tensor `{tensor}`: write `?` for it"
            )
        return shapes

    def _operand(
        self, argument_place: Place | None, tensor: Tensor, shapes: tuple[Shape, ...], rest: int
    ) -> AnnotatedOperand:
        dims = tensor.dims
        if dims is None or (argument_place is not None and not shapes):
            return AnnotatedOperand(argument_place, None, shapes, tensor)
        if dims == (_ONE,) and shapes and not any(shapes):
            dims = ()  # `1` also means a tensor without dimensions
        own_rest = rest if not shapes else _rest_count(Tensor(dims), shapes[0])
        written: list[Dim] = []
        for dim in dims:
            if dim.is_rest:
                # A tensor with fewer dimensions has the last ones, as in torch's broadcasting.
                names = [f"{REST_MARK}{at}" for at in range(rest - own_rest, rest)]
                written += [Dim((DimFactor(name, dim.factors[0].suffix),)) for name in names]
            else:
                written.append(dim)
        operand = AnnotatedOperand(argument_place, tuple(written), shapes, tensor)
        for shape in shapes:
            if len(shape) != len(written):
                least = " or more" if any(dim.is_rest for dim in dims) else ""
                count = len([dim for dim in dims if not dim.is_rest])
                have = f"{len(shape)} dimensions {shape}"
                self._fail(f"{operand.words} has {have}, `{tensor}` has {count}{least}")
        return operand

    def _without_broadcast(self, operand: AnnotatedOperand) -> AnnotatedOperand:
        """A dimension of length 1 with the name of a longer one is replicated."""
        if operand.dims is None or not operand.shapes:
            return operand
        dims = list(operand.dims)
        for at, dim in enumerate(dims):
            ones = {shape[at] == 1 for shape in operand.shapes}
            if True in ones and any(self._lengths.get(each.name, 1) != 1 for each in dim.factors):
                if len(ones) > 1:
                    some = "is a list in which only some tensors have length 1"
                    self._fail(f"{operand.words} {some} at `{dim}`: write `_`")
                dims[at] = _ONE
        return dataclasses.replace(operand, dims=tuple(dims))

    # --- lengths ----------------------------------------------------------------------------------

    # Tensors give only the product of `(h d)`. All factors but one must be known from elsewhere.

    def _learn_lengths(
        self, inputs: tuple[AnnotatedOperand, ...], outputs: tuple[AnnotatedOperand, ...]
    ) -> None:
        names = {factor.name for dim in _dims(inputs + outputs) for factor in dim.factors}
        number_arguments: list[tuple[Dim, Any, str]] = [
            (Dim((DimFactor(name),)), value, f"argument `{name}`")
            for name, value in self._call.kwargs.items()
            if name in names
        ]
        for number in self._signature.numbers:
            if isinstance(number, Number):
                value = value_at(self._call, number.place, number.item)
                number_arguments.append((number.dim, value, f"argument `{number.argument}`"))
        measured = [
            _Measure(dim, length, f"dimension {at} of {operand.words}")
            for operand in inputs
            for shape in operand.shapes
            for at, (dim, length) in enumerate(zip(operand.dims or (), shape, strict=False))
        ]
        # torch infers a size of -1 from the others.
        sizes = [
            _Measure(*each) for each in number_arguments if type(each[1]) is int and each[1] >= 0
        ]
        # Lengths of 1, which may be broadcast, come last.
        unsettled = self._learn([*sizes, *(each for each in measured if each.length != 1)])
        unsettled = self._learn(unsettled + [each for each in measured if each.length == 1])
        for dim, length, where in unsettled:
            unknown = [each.name for each in dim.factors if self._size(each) is None]
            if length == 1:
                self._lengths |= dict.fromkeys(unknown, 1)
            elif unknown:
                hint = f"give one of them as an argument, and write `; argument={unknown[0]}`"
                both = " and ".join(unknown)
                self._fail(f"{where} is {length}, but the lengths of {both} are unknown: {hint}")

    def _learn(self, measures: list[_Measure]) -> list[_Measure]:
        """Learn what can be learned; return what still has more than one unknown factor."""
        while True:
            later = [measure for measure in measures if not self._settle(measure)]
            if len(later) == len(measures):
                return later
            measures = later

    def _size(self, factor: DimFactor) -> int | None:
        return int(factor.name) if factor.is_number else self._lengths.get(factor.name)

    def _settle(self, measure: _Measure) -> bool:
        """Learn the last unknown factor of a dimension; return whether all factors are known."""
        dim, length, where = measure
        if dim.factors[0].name == ANY_LENGTH:
            return True
        sizes = [self._size(factor) for factor in dim.factors]
        known_product = prod(size for size in sizes if size is not None)
        unknown = [factor.name for factor in dim.factors if self._size(factor) is None]
        if len(unknown) > 1:
            return False
        if unknown:
            if known_product == 0 or length % known_product:
                rest = f"not a multiple of {known_product}, the other factors of `{dim}`"
                self._fail(f"{where} is {length}, {rest}")
            self._lengths[unknown[0]] = length // known_product
            self._sources[unknown[0]] = where
        elif length != known_product and (
            length != 1 or all(each.is_number for each in dim.factors)
        ):
            factor_words = "; ".join(
                f"{each.name} is {self._lengths[each.name]} by "
                f"{self._sources.get(each.name, 'itself')}"
                for each in dim.factors
                if not each.is_number
            )
            self._fail(
                f"{where} is {length}, not {known_product} as `{dim}`"
                + (f" ({factor_words})" * bool(factor_words))
            )
        return True

    def _fail(self, why: str) -> NoReturn:
        raise UsageError(
            f"`{self._signature}` does not fit this call of {operator_name(self._call)}: {why}"
        )


def _rest_count(tensor: Tensor, shape: Shape) -> int:
    """The number of dimensions that `*` stands for."""
    dims = tensor.dims or ()
    return len(shape) - len(dims) + 1 if any(dim.is_rest for dim in dims) else 0


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
    why[ANY_LENGTH] = "is never split"
    for name, length in lengths.items():
        if length <= 1:
            why.setdefault(name, f"has length {length}")
    for operand in operands:
        seen_names: set[str] = set()
        for dim in operand.dims or ():
            first = _first_factor(dim, lengths)
            for factor in dim.factors:
                if factor.is_number:
                    continue
                if factor.name in seen_names:
                    why.setdefault(factor.name, f"occurs twice in `{operand.tensor}`")
                seen_names.add(factor.name)
                if factor != first:
                    why.setdefault(factor.name, f"is not the first factor of `{dim}`")
    return why


# --- The recipe for the split of one identifier ---------------------------------------------------


class IdentifierSplit:
    """The roles of all arguments and results when one identifier is split."""

    def __init__(self, expansion: Expansion, name: str, ranks: int | None = None) -> None:
        self._expansion = expansion
        self._name = name
        self._ranks = ranks

    def obstacle(self) -> str | None:
        """The reason why it cannot be split in this call, if there is one."""
        name, ranks, call = self._name, self._ranks, self._expansion.call
        if name in self._expansion.frozen:
            return f"{name} {self._expansion.frozen[name]}"
        numbers = self.numbers
        sized = [rule for _, rule in numbers if not isinstance(rule, Group)]
        if self._split_argument() is None and not sized:
            return f"no input has {name}, and no argument depends on it"
        length = self._expansion.lengths.get(name)
        if ranks is not None and length is not None and length < ranks:
            return f"{name} has length {length}, too short for {ranks} ranks"
        for argument_place, rule in numbers:
            if isinstance(rule, Group) and (
                isinstance(argument_place, str) or argument_place < len(call.args)
            ):
                continue  # the ranks get their group in any case
            value = value_at(call, argument_place, rule.item if isinstance(rule, Divided) else None)
            if value is None:
                return f"argument {argument_place} depends on {name}, but the call does not give it"
            # A number that is a multiple of the length can only be divided evenly.
            uneven = ranks is not None and length is not None and length % ranks
            if isinstance(rule, Divided) and value != length and uneven:
                uneven_split = f"{ranks} ranks do not divide {length}"
                return (
                    f"argument {argument_place} is {value} and depends on {name}, but "
                    f"{uneven_split}"
                )
        return None

    @functools.cached_property
    def inputs(self) -> tuple[tuple[Place, Role], ...]:
        """The role of every tensor argument."""
        call = self._expansion.call
        return tuple(
            (operand.place, self._placement(operand))
            for operand in self._expansion.inputs
            if operand.place is not None and holds_tensor(value_at(call, operand.place))
        )

    @functools.cached_property
    def outputs(self) -> tuple[Role, ...]:
        """The role of every result."""
        return tuple(map(self._combine, self._expansion.outputs))

    @functools.cached_property
    def numbers(self) -> tuple[tuple[Place, KeywordRule], ...]:
        """The arguments that change with the split."""
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
        return tuple((argument_place, rule) for (argument_place, _), rule in rules.items())

    def _split_argument(self) -> Place | None:
        return next(
            (argument_place for argument_place, role in self.inputs if isinstance(role, Shard)),
            None,
        )

    def _find(self, operand: AnnotatedOperand) -> tuple[int, Dim] | None:
        for at, dim in enumerate(operand.dims or ()):
            if any(factor.name == self._name for factor in dim.factors):
                return at, dim
        return None

    def _placement(self, operand: AnnotatedOperand) -> Role:
        position_and_dim = self._find(operand)
        if position_and_dim is not None:
            at, dim = position_and_dim
            # The identifier is the first factor that is not 1, so the others make up one unit.
            lengths = self._expansion.lengths
            others = [factor for factor in dim.factors if factor.name != self._name]
            unit = prod(int(each.name) if each.is_number else lengths[each.name] for each in others)
            return Shard(at, unit, dim.halo)
        control = operand.tensor.control(self._name)
        if control is not None and control.kind == "!":
            # Without a name it applies to every sum, but to no other reduction.
            counted = control.name or self._expansion.suffixes[self._name] == "sum"
            return Once() if counted else Replicate()
        if control is not None and control.kind == "@":
            return Replicate(own=True)
        return Replicate(summed=control is None)

    def _combine(self, operand: AnnotatedOperand) -> Role:
        position_and_dim = self._find(operand)
        if position_and_dim is not None:
            return Shard(position_and_dim[0])
        control = operand.tensor.control(self._name)
        if operand.dims is None and control is None:
            return Replicate()
        suffix = self._expansion.suffixes[self._name] if control is None else control.kind
        reduction = reduction_of(suffix)
        return Replicate() if reduction is None else Partial(reduction)


@dataclasses.dataclass(frozen=True)
class Option:
    """A dimension to split, as a configuration names it.

    Attributes:
        idx: index of the tensor: positional arguments, then keyword inputs, then outputs.
        dim: index of the dimension.
        num: number of ranks, if the option has one.
    """

    idx: int
    dim: int
    num: int | None = None

    @classmethod
    def of(cls, mapping: Mapping[str, object], *, least_ranks: int = 1) -> Option:
        """Parse `{'idx': 0, 'dim': 1}`, optionally with `num`.

        Raises:
            UsageError: a key is unknown or missing, or a value is not an integer.
        """
        hint = "write {'idx': 0, 'dim': 1}, and 'num' for the number of ranks"
        if not isinstance(mapping, Mapping):
            raise UsageError(f"partition option {mapping!r} is not a dictionary: {hint}")
        least = {"idx": 0, "dim": 0, "num": least_ranks}
        faults = [f"has no key `{key}`" for key in ("idx", "dim") if key not in mapping]
        faults += [f"has the unknown key {key!r}" for key in mapping if key not in least]
        if faults:
            raise UsageError(f"partition option {dict(mapping)!r} {faults[-1]}: {hint}")
        numbers: dict[str, int] = {}
        for key, value in mapping.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < least[key]:
                fault = f"`{key}` must be an integer of {least[key]} or more, got {value!r}"
                raise UsageError(f"partition option {dict(mapping)!r}: {fault}")
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
    """How an operator can be split, for arguments of any shape."""

    signature: AnnotationSignature

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Parse an annotation.

        Raises:
            UsageError: it is not valid; a caret shows where.
        """
        if not isinstance(text, str):
            raise UsageError(
                f"an annotation is a string such as `m k+, n k+ -> m n`, got {text!r:.60}"
            )
        return _parse(text)

    @functools.cached_property
    def text(self) -> str:
        """The annotation in its canonical spelling."""
        return str(self.signature)

    def __str__(self) -> str:
        return self.text

    def check(self, call: OperatorCall) -> None:
        """Raise a `UsageError` if it does not fit a call."""
        expand(self.signature, call)

    def options(self, call: OperatorCall) -> list[Option]:
        """What can be split in this call: each identifier once, at its first occurrence."""
        expansion = expand(self.signature, call)
        options_by_name: dict[str, Option] = {}
        for idx, operand in enumerate(expansion.operands):
            for at, dim in enumerate(operand.dims or ()):
                factor = expansion.first_factor(dim)
                if factor.is_number or factor.name in options_by_name:
                    continue
                if IdentifierSplit(expansion, factor.name).obstacle() is None:
                    options_by_name[factor.name] = Option(idx, at)
        return list(options_by_name.values())

    def recipe(self, call: OperatorCall, option: Option) -> Recipe:
        """The recipe for a split of this dimension.

        Raises:
            UsageError: the dimension does not exist or cannot be split.
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
    """The identifier that an option names, or the reason why there is none."""
    operands = expansion.operands
    if not 0 <= option.idx < len(operands):
        counts = f"{len(expansion.inputs)} inputs and {len(expansion.outputs)} outputs"
        return "", f"there are {counts}, so idx must be 0 to {len(operands) - 1}"
    operand = operands[option.idx]
    if operand.dims is None:
        return "", f"{operand.words} is not a tensor, or one that is never split"
    if not 0 <= option.dim < len(operand.dims):
        return "", f"{operand.words} has {len(operand.dims)} dimensions, counted from 0"
    factor = expansion.first_factor(operand.dims[option.dim])
    if factor.is_number:
        return "", f"dimension {option.dim} of {operand.words} has the fixed length {factor.name}"
    return factor.name, None


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Annotation:
    return Annotation(parse_signature(text))
