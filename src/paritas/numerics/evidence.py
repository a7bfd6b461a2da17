"""What a judge may ask beyond two native results; each answer is made when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paritas.numerics.criterion import UNIT_F64

if TYPE_CHECKING:
    from torch import Tensor


class Evidence(Protocol):
    """Further runs of the two programs, seen at one item."""

    @property
    def unit(self) -> float | None:
        """Unit roundoff of the precision the program runs in; None if there is no program."""

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the program, if it was looked for.

        Asked of equal bits, so it must cost little; None where a look would cost more.
        """

    @property
    def lift_unit(self) -> float:
        """Unit roundoff at which the lifted run is judged.

        2^-53, or 2^-24 where the candidate may compute in float32 whatever it is given.
        """
        ...

    def arbiter(self) -> Tensor | None:
        """The reference's value in float64, or None where there is no wider run."""

    def lifted(self) -> Tensor | None:
        """The candidate's value in float64, or None if it could not be lifted."""

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """Per element, the rms deviation of the reference under rounding noise of size `unit`.

        Taken over so many perturbed runs; infinite where rounding decides if a value is finite.
        """

    def least_spread(self) -> Tensor | None:
        """Per element, a part of the spread at the program's own precision that costs no run.

        Never more than the whole, so what passes by it passes; None where no part is known.
        """

    def undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """Where `candidate`'s discrete values differ, whether rounding of size `unit` decides."""


class NoEvidence:
    """Two values and nothing about the programs behind them."""

    unit: float | None = None
    lift_unit: float = UNIT_F64

    def coarsest(self) -> float | None:
        """No program, so nothing inside."""
        return None

    def arbiter(self) -> Tensor | None:
        """No program, so no arbiter."""
        return None

    def lifted(self) -> Tensor | None:
        """No program, so nothing to lift."""
        return None

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """No program, so nothing to perturb."""
        return None

    def least_spread(self) -> Tensor | None:
        """No program, so no step of it is known."""
        return None

    def undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """No program, so every discrete value counts."""
        return None
