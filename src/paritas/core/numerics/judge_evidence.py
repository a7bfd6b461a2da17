"""What the judge may ask for beyond two native results: further runs of the two programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paritas.core.numerics.criterion import UNIT_F64

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paritas.core.numerics.criterion import Jumps
    from paritas.core.numerics.whole_error import WholeError


class JudgeEvidence(Protocol):
    """Further runs of the two programs, for one item."""

    @property
    def unit(self) -> float | None:
        """Unit roundoff of the precision the program runs in; None if there is no program."""

    @property
    def summed_unit(self) -> float:
        """Unit roundoff of the numbers that the value has random sums of; 0 if it is no sketch."""
        ...

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the program; None if that is expensive.

        Called for equal bits, so it must be cheap.
        """

    @property
    def lift_unit(self) -> float:
        """Unit roundoff for judging the lifted run.

        2^-53, or 2^-24 if the candidate may compute in float32 on any input.
        """
        ...

    def arbiter(self) -> Tensor | None:
        """The reference's value in float64, or None if there is no wider run."""

    def lift_candidate(self) -> Tensor | None:
        """The candidate's value in float64, or None if it could not be lifted."""

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """Per element, the rms deviation of the reference under rounding noise of size `unit`.

        Measured over at least `runs` perturbed runs; infinite where rounding decides if a value is
        finite.
        """

    def runs_made(self, unit: float) -> int:
        """The number of perturbed runs that the spread is measured over so far."""
        ...

    def whole_errors(self, unit: float) -> tuple[WholeError, ...]:
        """The errors of these runs as a whole; empty if unknown."""
        ...

    def repeats(self, runs: int) -> list[Tensor]:
        """The value in `runs` more native runs of the reference; empty if its bits never change."""
        ...

    def jumps(self, unit: float, pairs: int) -> Jumps | None:
        """How far decisions within rounding of size `unit`, and nothing else, move each element.

        Measured over `pairs` pairs of perturbed runs.
        """

    @property
    def is_smooth(self) -> bool:
        """Whether the perturbed runs so far show that the program decides nothing by rounding."""
        ...

    @property
    def is_gradient(self) -> bool:
        """Whether the value is a gradient: at a kink it has more than one right value."""
        ...

    def open_decisions(self) -> dict[str, tuple[int, int]]:
        """Operator -> how many of its decisions rounding can flip, of how many."""
        ...

    def least_spread(self) -> Tensor | None:
        """A lower bound of the spread at the program's own precision that needs no run, or None.

        It is never above the spread, so a value that passes by it passes.
        """

    def find_undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """Where discrete values of `candidate` differ: does rounding of size `unit` decide them?"""

    def may_have_shape(self, shape: torch.Size) -> bool:
        """Whether rounding decides the shape of the value, and this is one that it may have."""
        ...

    def wide_pair(self) -> tuple[Tensor, Tensor] | None:
        """The values of both in float64 where they have one shape, be it the native one or not."""


class NoEvidence:
    """Two values and nothing about the programs behind them."""

    unit: float | None = None
    lift_unit: float = UNIT_F64
    summed_unit: float = 0.0
    is_smooth: bool = False
    is_gradient: bool = False

    def coarsest(self) -> float | None:
        """No program, so no dtypes inside."""
        return None

    def arbiter(self) -> Tensor | None:
        """No program, so no arbiter."""
        return None

    def lift_candidate(self) -> Tensor | None:
        """No program, so nothing to lift."""
        return None

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """No program, so nothing to perturb."""
        return None

    def runs_made(self, unit: float) -> int:
        """No program, so no runs."""
        return 0

    def whole_errors(self, unit: float) -> tuple[WholeError, ...]:
        """No program, so no runs."""
        return ()

    def repeats(self, runs: int) -> list[Tensor]:
        """No program, so no runs."""
        return []

    def jumps(self, unit: float, pairs: int) -> Jumps | None:
        """No program, so no decisions."""
        return None

    def open_decisions(self) -> dict[str, tuple[int, int]]:
        """No program, so no decisions."""
        return {}

    def least_spread(self) -> Tensor | None:
        """No program, so no known spread."""
        return None

    def find_undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """No program, so every discrete value must be equal."""
        return None

    def may_have_shape(self, shape: torch.Size) -> bool:
        """No program, so shapes must be equal."""
        return False

    def wide_pair(self) -> tuple[Tensor, Tensor] | None:
        """No program, so no values in float64."""
        return None
