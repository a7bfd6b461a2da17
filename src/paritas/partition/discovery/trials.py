"""Cuts of an operator tried on draws of its arguments.

A trial that raises has failed; that a cut cannot be run is the commonest reason to refuse it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from paritas.errors import UsageError
from paritas.partition.discovery import draws as drawing
from paritas.partition.discovery.combines import (
    agree,
    could_be_part,
    is_constant,
    is_telling,
    ways,
)
from paritas.partition.recipes import Combine, Place, Reduce

if TYPE_CHECKING:
    from paritas.partition.discovery.cuts import Cut, Outcome, Subject, Tensors

__all__ = ["Bench", "Draw", "Tried"]

SEED = 0
RECOUNTS = 4


@dataclasses.dataclass(frozen=True)
class Draw:
    """Arguments, and what the operator makes of them."""

    tensors: Tensors
    whole: Outcome

    @functools.cached_property
    def is_constant(self) -> bool:
        """Whether a result has the same value everywhere."""
        return any(is_constant(tensor) for tensor in self.whole.tensors)


@dataclasses.dataclass(frozen=True)
class Tried:
    """How a cut fared.

    Attributes:
        ways: for each result, how the ranks' can be put together; None if a result cannot be.
        whole_sized: whether each rank's results are as large as the whole's: they may be terms.
    """

    ways: list[list[Combine]] | None
    whole_sized: bool = False


class Bench:
    """An operator with draws of its arguments.

    Attributes:
        given: what was given, in float64.
        first: the same with other values in place of those that are all the same.
        written: the arguments that the operator writes to.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._generator = torch.Generator().manual_seed(SEED)
        self.given = self._given()
        varied = drawing.varied(self.given.tensors, self._generator)
        changed = any(varied[place] is not one for place, one in self.given.tensors.items())
        self.first = (self._more_telling(varied) if changed else None) or self.given
        self.written = self._written_to(self.first)

    @property
    def shapes(self) -> dict[Place, torch.Size]:
        """Of the tensors."""
        return {place: tensor.shape for place, tensor in self.first.tensors.items()}

    @functools.cached_property
    def second(self) -> Draw:
        """Other values; those that were given once more where the operator takes no others."""
        tensors = self.first.tensors
        return (
            self._more_telling(drawing.redrawn(tensors, self._generator))
            or self._more_telling(drawing.reshuffled(tensors, self._generator))
            or self.first
        )

    @functools.cached_property
    def shades(self) -> list[Draw]:
        """Values that tell apart what ordinary ones do not."""
        base = self.second.tensors
        drawn = (drawing.shaded(base, shade, self._generator) for shade in drawing.SHADES)
        return [draw for draw in map(self._draw, drawn) if draw is not None]

    @functools.cached_property
    def recounted(self) -> list[Draw]:
        """Other counts of each class and index: ignored targets may be even by accident."""
        base = self.second.tensors
        drawn = [drawing.recounted(base, self._generator) for _ in range(RECOUNTS)]
        if all(drawn[0][place] is tensor for place, tensor in base.items()):
            return []
        return [draw for draw in map(self._draw, drawn) if draw is not None]

    # --- results ----------------------------------------------------------------------------------

    def attempt(self, cut: Cut, draw: Draw, ranks: int) -> Tried:
        """Run the operator per rank, and find how the results make the whole."""
        whole, outcomes = draw.whole, []
        try:
            for rank in range(ranks):
                own = self.run_rank(draw.tensors, cut, rank, ranks)
                if not _is_like(own, whole):
                    return Tried(None)
                if rank == 0 and not all(map(could_be_part, own.tensors, whole.tensors)):
                    return Tried(None)  # most cuts end here, before the other ranks are run
                outcomes.append(own)
        except Exception:  # noqa: BLE001  (the user's operator refuses the cut: it is not claimed)
            return Tried(None)
        parts = list(zip(*(outcome.tensors for outcome in outcomes), strict=True))
        sized = all(
            part[0].shape == one.shape for part, one in zip(parts, whole.tensors, strict=True)
        )
        found = [ways(list(part), one) for part, one in zip(parts, whole.tensors, strict=True)]
        if cut.once:  # zeros in place of it are right in a sum alone
            found = [[way for way in options if way == Reduce("sum")] for options in found]
        if not all(found) or not self._arguments_agree(cut, outcomes, whole):
            return Tried(None, sized)
        return Tried(found, sized)

    def run_rank(self, tensors: Tensors, cut: Cut, rank: int, ranks: int) -> Outcome:
        """Run the operator on what a rank has."""
        return self.subject.run_rank(tensors, cut, rank, ranks, fresh=bool(self.written))

    def _arguments_agree(self, cut: Cut, outcomes: list[Outcome], whole: Outcome) -> bool:
        """Of an operator that writes to its arguments: split ones make the whole, others agree."""
        dims = {place: dim for place, dim, _ in cut.dims}
        for place in self.written:
            truth = whole.arguments[place]
            left = [outcome.arguments[place] for outcome in outcomes]
            found = [torch.cat(left, dims[place])] if place in dims else left
            if place in cut.once or not all(agree(one, truth) for one in found):
                return False
        return True

    # --- draws ------------------------------------------------------------------------------------

    def _given(self) -> Draw:
        """What was given, in float64 where the operator takes that."""
        tensors = self.subject.tensors()
        own = {place: tensor.detach() for place, tensor in tensors.items()}
        lifted = self._draw(drawing.lifted(own))
        if lifted is not None:
            return lifted
        try:
            return Draw(own, self.run_whole(own))
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UsageError(f"the operator itself fails on these arguments: {told}") from error

    def _more_telling(self, tensors: Tensors) -> Draw | None:
        """None where it makes the results constant that were not: it says less, not more."""
        draw = self._draw(tensors)
        return None if draw is None or (draw.is_constant and not self.given.is_constant) else draw

    def _draw(self, tensors: Tensors) -> Draw | None:
        """None where the operator fails on it, or gives nothing to compare."""
        try:
            whole = self.run_whole(tensors)
        except Exception:  # noqa: BLE001  (a draw outside of the operator's domain is left out)
            return None
        if not all(map(is_telling, whole.tensors)):
            return None
        return Draw(tensors, whole)

    def run_whole(self, tensors: Tensors) -> Outcome:
        """Run the operator as it is, on copies: it may write to them."""
        return self.subject.run({place: tensor.clone() for place, tensor in tensors.items()})

    @staticmethod
    def _written_to(draw: Draw) -> list[Place]:
        return [
            place
            for place, tensor in draw.tensors.items()
            if not agree_bits(draw.whole.arguments[place], tensor)
        ]


def agree_bits(found: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether an argument was left alone."""
    return found.shape == truth.shape and bool(
        ((found == truth) | ((found != found) & (truth != truth))).all()  # noqa: PLR0124  (NaN)
    )


def _is_like(own: Outcome, whole: Outcome) -> bool:
    return len(own.tensors) == len(whole.tensors) and own.others == whole.others
