"""The evidence about one item of a call: that of the reference, and the candidate in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paritas.core.execution.held_values import MISSING
from paritas.core.numerics.automatic import MOST_RUNS
from paritas.core.numerics.criterion import (
    ERROR_RATE,
    MAX_Z,
    UNIT_F64,
    Jumps,
    most_hidden,
    most_shown,
    unit_roundoff,
)
from paritas.core.numerics.metrics import promotable
from paritas.core.numerics.whole_error import WholeError
from paritas.core.operators.catalogue import operators_of
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from paritas.core.execution.evidence import Demand, Evidence
    from paritas.core.execution.observation import Observation
    from paritas.core.execution.program import Program
    from paritas.core.results.items import Item


# --- The candidate in float64 ---------------------------------------------------------------------


class Lifted(Protocol):
    """The candidate in float64."""

    @property
    def unit(self) -> float:
        """Unit roundoff at which it is judged."""
        ...

    def runs(self) -> list[Observation] | None:
        """The runs, call by call; None if there is no such run."""

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the reference, if known."""

    def initial(self, item: Item) -> Any:
        """A value of the candidate before the call, or `MISSING`."""


class GivenLift:
    """Runs that were made elsewhere."""

    def __init__(
        self,
        make: Callable[[], list[Observation] | None] = lambda: None,
        rounded: Collection[torch.dtype] = (),
    ) -> None:
        """`rounded` are narrow dtypes to which values in these runs were rounded."""
        self._make = make
        self._rounded = rounded

    @property
    def unit(self) -> float:
        """Unit roundoff of float64, or of the coarsest dtype in `rounded`."""
        narrow = [unit_roundoff(dtype) for dtype in self._rounded if dtype.is_floating_point]
        return max([UNIT_F64, *narrow])

    def runs(self) -> list[Observation] | None:
        """The given runs."""
        return self._make()

    def coarsest(self) -> float | None:
        """None: it is not known."""
        return None

    def initial(self, item: Item) -> Any:
        """`MISSING`: the runs have all values."""
        return MISSING


# Compiled code is judged natively: in float64 it would be another program.
NO_LIFT = GivenLift()


# --- The evidence about one item ------------------------------------------------------------------


class ItemEvidence:
    """The evidence about one item of one call."""

    def __init__(
        self,
        evidence: Evidence[Program],
        item: Item,
        call: int = 0,
        *,
        lifted: Lifted = NO_LIFT,
        demand: Demand | None = None,
        also: tuple[Evidence[Program], ...] = (),
        in_float64: bool = False,
    ) -> None:
        """Select one item.

        Args:
            lifted: the candidate in float64.
            demand: what the comparison still needs; by default, everything.
            also: programs whose rounding is also noise of this item.
            in_float64: the two lifted runs are compared, for which there is no wider arbiter.
        """
        self.evidence = evidence
        self.item = item
        self.call = call
        self.also = also
        self.in_float64 = in_float64
        self._lifted = lifted
        self._demand = demand

    @property
    def unit(self) -> float | None:
        """Unit roundoff of the program's precision."""
        return UNIT_F64 if self.in_float64 else self.evidence.unit

    @property
    def summed_unit(self) -> float:
        """Unit roundoff of a gradient of which a sketch is kept; 0 for other values."""
        return 0.0 if self.in_float64 else self.evidence.summed_unit(self.item, self.call)

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the reference, if known."""
        return self._lifted.coarsest()

    @property
    def lift_unit(self) -> float:
        """Unit roundoff at which the lifted run is judged."""
        return self._lifted.unit

    def arbiter(self) -> Tensor | None:
        """The reference's value in float64."""
        if self.in_float64:
            return None
        value, native = self._true_value(), self._native()
        if value is None or native is None:
            return None
        return value if value.shape == native.shape else None

    def lift_candidate(self) -> Tensor | None:
        """The candidate's value in float64."""
        arbiter = self.arbiter()
        value = None if arbiter is None else self._meant_value()
        if value is None or arbiter is None or value.shape != arbiter.shape:
            return None
        return value.to(arbiter.device)

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """The rms deviation over perturbed runs; for several programs, the largest.

        It is that of the value in float64, which may have another shape than the native one.
        """
        own_spread = self.evidence.spread(unit, self.call, self.item, runs, self._demand)
        native = self._native()
        if unit == self.unit and own_spread is not None and native is not None:
            own_spread = own_spread if own_spread.shape == native.shape else None
        for other in self.also:
            other_spread = other.spread(unit, self.call, self.item, runs)
            if (
                own_spread is not None
                and other_spread is not None
                and own_spread.shape == other_spread.shape
            ):
                own_spread = torch.maximum(own_spread, other_spread)
        return own_spread

    def runs_made(self, unit: float) -> int:
        """The number of perturbed runs so far; for several programs, the fewest."""
        run_count = self.evidence.runs_made(unit, self._demand)
        return min([run_count, *(other.runs_made(unit) for other in self.also)])

    def whole_errors(self, unit: float) -> tuple[WholeError, ...]:
        """The errors of these runs as a whole; for several programs, the largest."""
        whole_errors = self.evidence.whole_errors(unit, self.call, self.item, self._demand)
        for other in self.also:
            other_errors = other.whole_errors(unit, self.call, self.item)
            whole_errors = tuple(
                WholeError(max(a.size, b.size), max(abs(a.factor), abs(b.factor)))
                for a, b in zip(whole_errors, other_errors, strict=False)
            )
        return whole_errors

    def repeats(self, runs: int) -> list[Tensor]:
        """The item in further native runs of the reference, if its bits change."""
        if self.in_float64:
            return []
        return self.evidence.repeats(self.call, self.item, runs, self._demand)

    def jumps(self, unit: float, pairs: int) -> Jumps | None:
        """The effect of decisions that rounding can flip; for several programs, the largest."""
        own_jumps = self.evidence.jumps(unit, self.call, self.item, pairs, self._demand)
        for other in self.also:
            other_jumps = other.jumps(unit, self.call, self.item, pairs)
            if (
                own_jumps is not None
                and other_jumps is not None
                and own_jumps.size.shape == other_jumps.size.shape
            ):
                own_jumps = own_jumps.or_larger(other_jumps)
        return own_jumps

    @property
    def is_smooth(self) -> bool:
        """Whether none of the programs makes decisions that rounding can flip."""
        return self.evidence.is_smooth and all(other.is_smooth for other in self.also)

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient."""
        return self.item.kind.is_gradient

    def open_decisions(self) -> dict[str, tuple[int, int]]:
        """Operator -> how many of its decisions rounding can flip, of how many."""
        return self.evidence.open_decisions

    def least_spread(self) -> Tensor | None:
        """The rounding of the last sum of a narrow value, as the arbiter shows it."""
        arbiter, native = self.evidence.arbiter(), self._native()
        if arbiter is None or len(arbiter) <= self.call or native is None:
            return None
        least = arbiter[self.call].least_noise.get(self.item)
        # A sum in float64 has no such rounding.
        narrow = native.dtype in WIDE and least is not None and least.shape == native.shape
        return least if narrow else None

    def find_undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """Where rounding of size `unit` decides between the reference's and this value."""
        native = self._native()
        if native is None or candidate.shape != native.shape:
            return None
        reference, candidate = promotable(native, candidate.to(native.device))
        contested = reference != candidate
        rate = ERROR_RATE / max(1, int(contested.sum()))
        near = torch.zeros_like(contested)
        for runs in range(1, MOST_RUNS + 1):
            decided = self.evidence.run_with_decisions(unit, runs, self._demand)
            call_runs = [run[self.call] for run in decided if len(run) > self.call]
            distance = self._distances(call_runs, reference, candidate)
            if distance is None:
                # The decision is unknown: rounding decides where a run gives the candidate's value.
                near = self._find_reached(call_runs, reference, candidate)
                if bool(near[contested].all()):
                    break
                continue
            near = distance <= MAX_Z
            far = distance > MAX_Z * most_hidden(runs, rate)
            surely_near = distance <= MAX_Z / most_shown(runs, rate)
            if bool(far[contested].any()) or bool(surely_near[contested].all()):
                break
        return near & contested

    def _distances(
        self, runs: list[Observation], reference: Tensor, candidate: Tensor
    ) -> Tensor | None:
        """The distance between the two choices, in multiples of how far rounding moves it.

        The first run is plain, the others are perturbed. None if it is not known what decides.
        """
        margins = [
            decision.margin(reference, candidate)
            for run in runs
            if (decision := run.decisions.get(self.item)) is not None
        ]
        known_margins = [margin for margin in margins if margin is not None]
        if not runs or len(known_margins) != len(runs):
            return None
        plain, *moved = known_margins
        moves = torch.stack([(margin - plain).double() for margin in moved])
        spread = moves.square().mean(dim=0).sqrt()
        distance = plain.abs() / spread
        # Either of two equal scores may be chosen, and a half may be rounded either way. But the
        # result of a comparison is exact if rounding does not move its operands.
        is_comparison = runs[0].decisions[self.item].kind in operators_of("comparisons")
        tie = math.inf if is_comparison else 0.0
        return torch.where((spread == 0) & (plain == 0), tie, distance)

    def _find_reached(
        self, runs: list[Observation], reference: Tensor, candidate: Tensor
    ) -> Tensor:
        """Where some run gives the candidate's value."""
        reached = torch.zeros_like(reference, dtype=torch.bool)
        for run in runs:
            value = self._complete(run)
            if isinstance(value, torch.Tensor) and value.shape == reference.shape:
                reached |= torch.eq(*promotable(value, candidate))
        return reached

    def may_have_shape(self, shape: torch.Size) -> bool:
        """Whether rounding decides the shape of the reference's value, and this may be it.

        The lifted run shows which one the candidate means; without it, one that was seen is right.
        """
        native, wide = self._native(), self._true_value()
        if self.in_float64 or native is None or wide is None:
            return False
        observed_shapes = {
            native.shape,
            wide.shape,
            *self.evidence.shapes.get((self.call, self.item), ()),
        }
        if len(observed_shapes) == 1:
            return False
        lifted = self._meant_value()
        return shape in observed_shapes if lifted is None else lifted.shape == wide.shape

    def wide_pair(self) -> tuple[Tensor, Tensor] | None:
        """The values of both in float64 where they have one shape."""
        wide, lifted = self._true_value(), self._meant_value()
        if wide is None or lifted is None or wide.shape != lifted.shape:
            return None
        return wide, lifted.to(wide.device)

    def _native(self) -> Tensor | None:
        value = self._complete(self.evidence.native[self.call])
        return value if isinstance(value, torch.Tensor) else None

    def _complete(self, observation: Observation) -> Any:
        value = self.evidence.complete(observation, self.item)
        return self._lifted.initial(self.item) if value is MISSING else value

    def _true_value(self) -> Tensor | None:
        """The reference's value in float64, of any shape."""
        return self._wide_value(self.evidence.arbiter())

    def _meant_value(self) -> Tensor | None:
        """The candidate's value in float64, of any shape."""
        return self._wide_value(self._lifted.runs())

    def _wide_value(self, observations: list[Observation] | None) -> Tensor | None:
        if observations is None or len(observations) <= self.call:
            return None
        value = self._complete(observations[self.call])
        if not isinstance(value, torch.Tensor):
            return None
        if value.dtype in WIDE:
            # A narrow value was not lifted, except for an unchanged initial value.
            return value.to(WIDE[value.dtype]) if self.item.kind.is_afterwards else None
        return value


class GivenItem(ItemEvidence):
    """Evidence with given values in float64: the arbiter and the lifted run."""

    def __init__(
        self,
        evidence: Evidence[Program],
        item: Item,
        before: Any,
        after: Any,
        *,
        lifted: Lifted = NO_LIFT,
    ) -> None:
        """`before` is the reference's value, `after` the candidate's."""
        super().__init__(evidence, item, lifted=lifted)
        self._pair = before, after

    def arbiter(self) -> Tensor | None:
        """The reference's value."""
        return self._true_value()

    def lift_candidate(self) -> Tensor | None:
        """The candidate's value."""
        pair = self.wide_pair()
        return None if pair is None else pair[1]

    def _true_value(self) -> Tensor | None:
        return self._pair[0] if isinstance(self._pair[0], torch.Tensor) else None

    def _meant_value(self) -> Tensor | None:
        return self._pair[1] if isinstance(self._pair[1], torch.Tensor) else None
