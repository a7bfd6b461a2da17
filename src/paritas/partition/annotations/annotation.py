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
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.partition.annotations.arguments import operator_name
from paritas.partition.annotations.expanding import Expansion, expand
from paritas.partition.annotations.parsing import parse_signature
from paritas.partition.annotations.splitting import IdentifierSplit
from paritas.partition.recipes import OperatorCall, Recipe

if TYPE_CHECKING:
    from paritas.partition.annotations.grammar import Signature

__all__ = ["Annotation", "Option"]

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


@dataclasses.dataclass(frozen=True)
class Annotation:
    """How an operator can be split, for any shapes."""

    signature: Signature

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
        name, obstacle = _identifier(expansion, option)
        split = IdentifierSplit(expansion, name, option.num)
        obstacle = obstacle or split.obstacle()
        if obstacle is not None:
            where = f"idx {option.idx}, dim {option.dim} of {operator_name(call)}"
            raise UsageError(f"{where} cannot be split by `{self.text}`: {obstacle}")
        words = f"{operator_name(call)}: {self.text}, split by {name}"
        return Recipe(split.inputs, split.outputs, split.numbers, words)


def _identifier(expansion: Expansion, option: Option) -> tuple[str, str | None]:
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
