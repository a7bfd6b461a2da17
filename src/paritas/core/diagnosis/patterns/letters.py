"""Sums over letters, `einsum`, with other letters."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# So many other letters are tried for one operand.
_MOST_TRIED = 120


def letter_variations(step: Step) -> Iterator[Variation]:
    """One operand, or the result, with other letters for axes of the same sizes."""
    equation = str(step.values["equation"]).replace(" ", "")
    tensors: Sequence[Tensor] = step.values["tensors"]
    if "->" not in equation or "." in equation:
        return
    before, result = equation.split("->")
    terms = before.split(",")
    if any(len(term) != tensor.dim() for term, tensor in zip(terms, tensors, strict=True)):
        return
    sizes = {
        letter: size
        for term, tensor in zip(terms, tensors, strict=True)
        for letter, size in zip(term, tensor.shape, strict=True)
    }
    for position, term in enumerate([*terms, result]):
        others = _other_letters(term, sizes, is_result=position == len(terms))
        for other in itertools.islice(others, _MOST_TRIED):
            changed = [*terms, result]
            changed[position] = other
            if not set(changed[-1]) <= set("".join(changed[:-1])):
                continue
            sentence = f"{term} is read as {other} in {equation}"
            is_turned = sorted(other) == sorted(term)
            kind = PatternKind.TRANSPOSE if is_turned else PatternKind.WRONG_INDEX
            other_equation = f"{','.join(changed[:-1])}->{changed[-1]}"
            yield Variation(kind, sentence, partial(_with_equation, equation=other_equation))


def _other_letters(term: str, sizes: dict[str, int], *, is_result: bool) -> Iterator[str]:
    """Orders of the same letters first, then other letters."""
    choices = [[size for size in sizes if sizes[size] == sizes[letter]] for letter in term]
    others = ["".join(letters) for letters in itertools.islice(itertools.product(*choices), 4096)]
    for is_turned in (True,) if is_result else (True, False):
        for other in others:
            is_order = sorted(other) == sorted(term)
            is_clear = len(set(other)) == len(other)
            if other != term and is_clear and is_order == is_turned:
                yield other


def _with_equation(step: Step, equation: str) -> Any:
    return step.run(equation=equation)
