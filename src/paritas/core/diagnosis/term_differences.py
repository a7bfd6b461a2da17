"""What kind of wrong it is that a result consists of other terms than it should.

The terms of both programs in one operand are known exactly: see `linear_terms`. Other elements with
the same factors are a wrong index, the same elements with other factors are a wrong factor, fewer
are a partial sum or zeros, and more are a residual. Any other combination has no name here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import unravel
from paritas.core.diagnosis.linear_terms import are_same, same_factors
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.linear_terms import Terms

# The share of the rows for which a statement about most of them must hold.
_MOST = 0.9


@dataclasses.dataclass(frozen=True)
class TermName:
    """What kind of wrong it is.

    Attributes:
        kind: the word.
        words: what a person would write.
        ratios: the factors of the candidate as multiples of the right ones, if only they differ.
    """

    kind: PatternKind
    words: str
    ratios: Tensor | None = None


def name_difference(right: Terms, wrong: Terms, name: str) -> TermName | None:
    """How the candidate's terms in an operand differ; None if they do not, or have no name.

    Args:
        name: what the operand is called.
    """
    if right.asked is None and wrong.asked is not None:
        right = right.restrict(wrong.asked)
    if wrong.asked is None and right.asked is not None:
        wrong = wrong.restrict(right.asked)
    if not len(wrong.keys) or not len(right.keys):
        return None  # it does not read it at all
    pair = _Pair(right, wrong, name)
    if pair.lost.any() and pair.more.any():
        return pair.name_exchanged()
    if pair.lost.any():
        return pair.name_lost()
    if pair.more.any():
        return pair.name_added()
    return pair.name_factors()


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    right: Terms
    wrong: Terms
    name: str

    @functools.cached_property
    def lost(self) -> Tensor:
        """Which of the right terms the candidate does not have."""
        return ~torch.isin(self.right.keys, self.wrong.keys)

    @functools.cached_property
    def more(self) -> Tensor:
        """Which of the candidate's terms are not among the right ones."""
        return ~torch.isin(self.wrong.keys, self.right.keys)

    @functools.cached_property
    def ratios(self) -> Tensor:
        """The factors of the common terms, as multiples of the right ones."""
        return self.wrong.factors[~self.more] / self.right.factors[~self.lost]

    @functools.cached_property
    def is_complete(self) -> bool:
        return self.right.asked is None

    @functools.cached_property
    def most_terms(self) -> tuple[int, int]:
        """The most terms of an element of the result, on both sides."""
        return int(self.right.counts.max()), int(self.wrong.counts.max())

    # --- The same elements, with other factors ---

    def name_factors(self) -> TermName | None:
        ratios, name = self.ratios, self.name
        if are_same(ratios, 1.0):
            return None
        reduction = self._other_reduction()
        if reduction is not None:
            return reduction
        if are_same(ratios, ratios[0]):
            kind = PatternKind.SIGN if are_same(ratios[:1], -1.0) else PatternKind.SCALE
            times = (
                "subtracted" if kind is PatternKind.SIGN else f"counted {_number(ratios[0])} times"
            )
            return TermName(kind, f"{name} is {times}", ratios)
        rows, columns = self.right.rows, self.right.columns
        differs = ~same_factors(ratios, 1.0)
        if are_same(ratios.abs(), 1.0):
            words = f"{self._terms_of(differs)} are subtracted"
            return TermName(PatternKind.SIGN, words, ratios)
        shape = self.right.result_shape
        axis = _axis_of(ratios, unravel(rows, shape), shape)
        if axis is not None:
            values = _values_along(ratios, unravel(rows, shape)[axis])
            words = f"the result has other factors along axis {axis}: {values}"
            return TermName(PatternKind.AXIS_SCALE, words, ratios)
        axis = _axis_of(ratios, unravel(columns, self.right.shape), self.right.shape)
        if axis is not None:
            values = _values_along(ratios, unravel(columns, self.right.shape)[axis])
            words = f"{name} is used with other factors along axis {axis}: {values}"
            return TermName(PatternKind.FACTOR, words, ratios)
        example = self._example(differs)
        return TermName(PatternKind.FACTOR, f"{name} is used with other factors: {example}", ratios)

    def _other_reduction(self) -> TermName | None:
        """A sum instead of a mean, or the other way round."""
        if not self.is_complete or self.most_terms[0] < 2:  # noqa: PLR2004
            return None
        counts = self.right.counts[self.right.rows].double()
        if float(counts.max()) == float(counts.min()) == 1:
            return None
        means, sums = 1 / counts, torch.ones_like(counts)
        for kind, actual_sums, expected_sums in (("sum", sums, means), ("mean", means, sums)):
            if are_same(self.right.factors, expected_sums) and are_same(
                self.wrong.factors, actual_sums
            ):
                other = "mean" if kind == "sum" else "sum"
                words = f"the {kind} of {self.name} instead of the {other}"
                return TermName(PatternKind.WRONG_REDUCTION, words)
        return None

    def _terms_of(self, mask: Tensor) -> str:
        columns = self.right.columns[mask].unique()
        others = self.right.columns[~mask]
        if not bool(torch.isin(others, columns).any()):
            places = unravel(columns, self.right.shape)
            for axis, position in enumerate(places):
                own_positions = position.unique()
                rest = unravel(others, self.right.shape)[axis].unique()
                if not bool(torch.isin(own_positions, rest).any()):
                    indices = _describe_indices(own_positions)
                    return f"the elements at {indices} along axis {axis} of {self.name}"
        return f"{int(mask.sum())} of {len(mask)} terms"

    def _example(self, mask: Tensor) -> str:
        error = (self.ratios - 1).abs() * mask
        position = int(error.argmax())
        row = _place_words(self.right.rows[position], self.right.result_shape)
        column = _place_words(self.right.columns[position], self.right.shape)
        factors = self.wrong.factors[position], self.right.factors[position]
        words = " instead of ".join(map(_number, factors))
        return f"the element {column} counts {words} times in the result's {row}"

    # --- Fewer elements ---

    def name_lost(self) -> TermName | None:
        if not self.is_complete:
            return None
        right, wrong = self.right, self.wrong
        blind = (right.counts > 0) & (wrong.counts == 0)
        lost_rows = torch.bincount(right.rows[self.lost], minlength=len(blind)) > 0
        if not are_same(self.ratios, 1.0):
            return self._name_fewer(lost_rows & ~blind)
        count = int(self.lost.sum())
        if bool((lost_rows == blind).all()):
            if not bool((wrong.rest[blind] == 0).all()):
                return None
            words = f"{int(blind.sum())} outputs that should read {self.name} are zero"
            return TermName(PatternKind.ZEROS, words)
        if bool(blind.any()):
            return None
        words = f"{count} of {len(right.keys)} terms of the sums of {self.name} are left out"
        return TermName(PatternKind.PARTIAL_SUM, f"{words}: {self._lost_words()}")

    def _lost_words(self) -> str:
        position = int(self.lost.int().argmax())
        column = _place_words(self.right.columns[position], self.right.shape)
        row = _place_words(self.right.rows[position], self.right.result_shape)
        return f"the element {column} is not in the result's {row}"

    def _name_fewer(self, rows: Tensor) -> TermName | None:
        """A mean of fewer elements, or one element instead of several."""
        right, wrong = self.right, self.wrong
        if not bool(rows.any()) or not _have_equal_sums(right, wrong, rows):
            return None
        ratios = self.ratios[rows[wrong.rows]]
        if are_same(ratios, ratios.round()) and bool(same_factors(ratios, 1.0).any()):
            words = f"elements of {self.name} are read several times instead of others"
            return TermName(PatternKind.WRONG_INDEX, f"{words}: {self._lost_words()}")
        if int(wrong.counts[rows].max()) == 1:
            most = int(right.counts[rows].max())
            words = f"one element of {self.name} is taken instead of {most}"
            return TermName(PatternKind.WRONG_REDUCTION, words)
        if not _have_equal_factors(right, rows):
            words = f"up to {self.most_terms[1]} elements of {self.name} have other weights"
            return TermName(PatternKind.OTHER_FUNCTION, f"{words}: {self._lost_words()}")
        words = f"{int(self.lost.sum())} of {len(right.keys)} terms of {self.name} are left out"
        words = f"{words}, and the others count as much more: {self._lost_words()}"
        return TermName(PatternKind.PARTIAL_SUM, words)

    # --- More elements ---

    def name_added(self) -> TermName | None:
        right, added_rows = self.right, self.wrong.rows[self.more]
        if not self.is_complete:
            return None
        was_empty = right.counts[added_rows] == 0
        keeps = are_same(self.ratios, 1.0)
        if bool(was_empty.all()):
            return self._name_written(keeps=keeps)
        # An element that is added to itself counts twice.
        unchanged_share = float(same_factors(self.ratios, 1.0).double().mean())
        is_usual = not bool(was_empty.any())
        adds = (
            unchanged_share >= _MOST
            if is_usual
            else keeps and float(was_empty.double().mean()) < _MOST
        )
        if self.most_terms[0] == 1 and adds:
            words = f"other elements of {self.name} are added: {self._added_words()}"
            return TermName(PatternKind.RESIDUAL, words)
        return self._name_larger(added_rows, keeps=keeps) if is_usual else None

    def _name_larger(self, added_rows: Tensor, *, keeps: bool) -> TermName | None:
        """A sum or a mean of more elements."""
        right, wrong, most = self.right, self.wrong, self.most_terms
        rows = torch.bincount(added_rows, minlength=len(right.counts)) > 0
        is_mean = _have_equal_sums(right, wrong, rows)
        usual = (_sums(right) / right.counts.clamp(min=1))[added_rows]
        if most[0] > 1 and keeps and not are_same(self.wrong.factors[self.more], usual):
            words = f"other elements of {self.name} are added: {self._added_words()}"
            return TermName(PatternKind.RESIDUAL, words)
        if most[1] == most[0] > 1 and (keeps or is_mean):
            words = f"elements of {self.name} are added up where there should be fewer"
            return TermName(PatternKind.WRONG_INDEX, f"{words}: {self._added_words()}")
        if most[0] > 1 and (keeps or is_mean):
            words = f"up to {most[1]} elements of {self.name} are added up instead of {most[0]}"
            return TermName(PatternKind.WRONG_REDUCTION, f"{words}: {self._added_words()}")
        if most[0] > 1 or not is_mean:
            return None
        if _have_equal_factors(wrong, rows):
            words = f"the mean of {most[1]} elements of {self.name} instead of one of them"
            return TermName(PatternKind.WRONG_REDUCTION, words)
        words = f"a weighted mean of {most[1]} elements of {self.name} instead of one of them"
        return TermName(PatternKind.OTHER_FUNCTION, words)

    def _name_written(self, *, keeps: bool) -> TermName | None:
        """Results that should not depend on the operand do."""
        right, wrong = self.right, self.wrong
        if not bool((right.rest[wrong.rows[self.more]] == 0).all()):
            return None
        if keeps and self._are_in_place():
            words = f"{int(self.more.sum())} elements of {self.name} that should be zero are not"
            return TermName(PatternKind.MASK, words)
        right_counts, wrong_counts = (
            torch.bincount(side.columns, minlength=math.prod(side.shape)) for side in (right, wrong)
        )
        if int(right_counts.max()) > 1 or int(right.counts.max()) > 1:
            return None
        most = int(wrong_counts.max())
        words = f"each element of {self.name} is written to {most} places instead of one"
        if keeps:
            return TermName(PatternKind.WRONG_INDEX, words)
        shares = torch.zeros(len(right_counts), dtype=torch.float64)
        shares.index_add_(0, wrong.columns, wrong.factors)
        totals = torch.zeros_like(shares).index_add_(0, right.columns, right.factors)
        if are_same(shares[right_counts > 0], totals[right_counts > 0]):
            words = f"each element of {self.name} is shared by {int(wrong_counts.max())} places"
            return TermName(PatternKind.OTHER_FUNCTION, f"{words} instead of written to one")
        return None

    def _are_in_place(self) -> bool:
        """Whether every element is that of the same place, if it is read at all."""
        sides = (self.right, self.wrong)
        in_place = all(bool((side.rows == side.columns).all()) for side in sides)
        return in_place and self.right.result_shape == self.right.shape

    def _added_words(self) -> str:
        position = int(self.more.int().argmax())
        column = _place_words(self.wrong.columns[position], self.wrong.shape)
        row = _place_words(self.wrong.rows[position], self.wrong.result_shape)
        return f"the element {column} is also in the result's {row}"

    # --- Other elements ---

    def name_exchanged(self) -> TermName | None:
        right, wrong = self.right, self.wrong
        if self._are_in_place() and are_same(wrong.factors, right.factors[0]):
            words = f"{int(self.lost.sum())} elements of {self.name} are left out and"
            words = f"{words} {int(self.more.sum())} others are not"
            return TermName(PatternKind.MASK, words)
        by_row = self.is_complete and _agree(right, wrong, of_columns=False)
        if by_row or _agree(right, wrong, of_columns=True):
            words = f"other elements of {self.name} are read: {self._exchanged_words()}"
            return TermName(PatternKind.WRONG_INDEX, words)
        if not self.is_complete:
            return None
        most = self.most_terms
        rows = torch.bincount(right.rows[self.lost], minlength=len(right.counts)) > 0
        if most[0] > 1 and most[1] == 1 and _have_equal_sums(right, wrong, rows):
            words = f"one element of {self.name} is taken instead of a mean of {most[0]}"
            return TermName(PatternKind.OTHER_FUNCTION, words)
        equal = are_same(right.factors, right.factors[0]) and are_same(
            wrong.factors, right.factors[0]
        )
        if most[0] > 1 and (equal or _are_means(right, wrong)):
            words = f"other elements of {self.name} are added up: {self._exchanged_words()}"
            return TermName(PatternKind.WRONG_INDEX, words)
        return None

    def _exchanged_words(self) -> str:
        position = int(self.more.int().argmax())
        row = self.wrong.rows[position]
        gone = self.right.columns[self.lost & (self.right.rows == row)]
        column = _place_words(self.wrong.columns[position], self.wrong.shape)
        at = _place_words(row, self.wrong.result_shape)
        words = f"the element {column} is in the result's {at}"
        return (
            f"{words} instead of {_place_words(gone[0], self.right.shape)}" if len(gone) else words
        )


# --- Facts about terms ----------------------------------------------------------------------------


def _sums(terms: Terms) -> Tensor:
    total = torch.zeros(len(terms.counts), dtype=torch.float64)
    return total.index_add_(0, terms.rows, terms.factors)


def _have_equal_sums(right: Terms, wrong: Terms, rows: Tensor) -> bool:
    """Whether a constant operand has the same effect on some elements of the result."""
    left, other = _sums(right)[rows], _sums(wrong)[rows]
    return bool(((left - other).abs() <= 1e-3 * left.abs()).all())


def _have_equal_factors(terms: Terms, rows: Tensor) -> bool:
    """Whether all factors of each of some elements of the result are the same."""
    means = _sums(terms) / terms.counts.clamp(min=1)
    use = rows[terms.rows]
    return are_same(terms.factors[use], means[terms.rows][use])


def _are_means(right: Terms, wrong: Terms) -> bool:
    """Whether both are means of elements, some of which may count several times."""
    use = (right.counts > 0) & (wrong.counts > 0)
    return _have_equal_sums(right, wrong, use) and all(map(_are_counts, (right, wrong)))


def _are_counts(terms: Terms) -> bool:
    """Whether the factors of each row are multiples of the smallest one."""
    least = torch.full((len(terms.counts),), torch.inf, dtype=torch.float64)
    least.scatter_reduce_(0, terms.rows, terms.factors, "amin")
    times = terms.factors / least[terms.rows]
    return bool((terms.factors > 0).all()) and are_same(times, times.round())


def _agree(right: Terms, wrong: Terms, *, of_columns: bool) -> bool:
    """Whether lines of both have the same factors; some may have none in the candidate."""
    sides = []
    for terms in (right, wrong):
        lines = terms.columns if of_columns else terms.rows
        order = terms.factors.argsort(stable=True)
        order = order[lines[order].argsort(stable=True)]
        sides.append((lines[order], terms.factors[order]))
    (positions, factors), (other_positions, others) = sides
    is_shared = torch.isin(positions, other_positions)
    share = float(is_shared.double().mean())
    if share < 0.5 or not bool(torch.isin(other_positions, positions).all()):  # noqa: PLR2004
        return False
    return torch.equal(positions[is_shared], other_positions) and are_same(
        factors[is_shared], others
    )


def _axis_of(values: Tensor, places: tuple[Tensor, ...], shape: tuple[int, ...]) -> int | None:
    """The axis of which alone some values depend; None if there is none."""
    for axis, size in enumerate(shape):
        if size < 2:  # noqa: PLR2004
            continue
        first = torch.zeros(size, dtype=values.dtype).index_copy_(0, places[axis], values)
        if are_same(values, first[places[axis]]) and len(places[axis].unique()) > 1:
            return axis
    return None


def _values_along(values: Tensor, places: Tensor) -> str:
    indices = places.unique().tolist()[:4]
    return ", ".join(f"{_number(values[places == index][0])} at {index}" for index in indices)


def _describe_indices(indices: Tensor) -> str:
    numbers = indices.tolist()
    if len(numbers) == 1:
        return f"index {numbers[0]}"
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1:  # noqa: PLR2004
        return f"indices {numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    return f"indices {', '.join(map(str, numbers[:4]))}" + (" ..." if len(numbers) > 4 else "")  # noqa: PLR2004


def _place_words(position: Tensor, shape: tuple[int, ...]) -> str:
    if not shape:
        return "()"
    return f"({', '.join(str(int(coordinate)) for coordinate in unravel(position, shape))})"


def _number(value: Tensor) -> str:
    return f"{float(value):.4g}"
