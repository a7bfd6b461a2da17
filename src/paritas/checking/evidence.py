"""The further runs of both programs, seen at one item: what the judge may ask about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.lifting import WIDE
from paritas._torch.operators import COMPARISONS
from paritas.checking.observing import Observation, is_afterwards
from paritas.numerics.criterion import MAX_Z
from paritas.numerics.metrics import promotable

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.checking.noise import NoiseRuns


class ItemEvidence:
    """The runs, seen at one item of one call."""

    def __init__(self, runs: NoiseRuns, path: str, call: int = 0, *, lifts: bool = True) -> None:
        """`lifts=False` where the candidate has no lifted run of this call."""
        self.runs = runs
        self.path = path
        self.call = call
        self.lifts = lifts

    @property
    def unit(self) -> float | None:
        """Unit roundoff of the program's precision."""
        return self.runs.unit

    def coarsest(self) -> float | None:
        """Unit roundoff of the coarsest dtype inside the reference, where that is looked for."""
        return self.runs.coarsest() if self.lifts else None

    @property
    def lift_unit(self) -> float:
        """Unit roundoff at which the lifted run is judged."""
        return self.runs.lift_unit

    def arbiter(self) -> Tensor | None:
        """The reference's value in float64."""
        value = self._value(self.runs.arbiter())
        native: Any = self.runs.complete(self.runs.native[self.call], self.path)
        if value is None or not isinstance(native, torch.Tensor):
            return None
        return value if value.shape == native.shape else None

    def lifted(self) -> Tensor | None:
        """The candidate's value in float64."""
        arbiter = self.arbiter()
        value = self._value(self.runs.lifted()) if self.lifts and arbiter is not None else None
        if value is None or arbiter is None or value.shape != arbiter.shape:
            return None
        return value.to(arbiter.device)

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """The rms deviation over perturbed runs."""
        return self.runs.spread(unit, self.call, self.path, runs)

    def least_spread(self) -> Tensor | None:
        """What the last sum behind a narrow value rounds, as the arbiter shows it."""
        arbiter = self.runs.arbiter()
        native: Any = self.runs.complete(self.runs.native[self.call], self.path)
        if arbiter is None or len(arbiter) <= self.call or not isinstance(native, torch.Tensor):
            return None
        least = arbiter[self.call].least_noise.get(self.path)
        # Of a sum in float64 there is no such rounding.
        narrow = native.dtype in WIDE and least is not None and least.shape == native.shape
        return least if narrow else None

    def undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """Where rounding of size `unit` decides between the reference's value and this one."""
        native: Any = self.runs.complete(self.runs.native[self.call], self.path)
        if not isinstance(native, torch.Tensor) or candidate.shape != native.shape:
            return None
        reference, candidate = promotable(native, candidate.to(native.device))
        runs = [run[self.call] for run in self.runs.decided(unit) if len(run) > self.call]
        margins = [
            decision.margin(reference, candidate)
            for run in runs
            if (decision := run.decisions.get(self.path)) is not None
        ]
        known = [margin for margin in margins if margin is not None]
        if runs and len(known) == len(runs):
            # What separates the two choices, against how much rounding moves it.
            plain, *moved = known
            moves = torch.stack([(margin - plain).double() for margin in moved])
            spread = moves.square().mean(dim=0).sqrt()
            near = plain.abs() <= MAX_Z * spread
            if runs[0].decisions[self.path].kind in COMPARISONS:
                # Of two equal scores either may be chosen, and a half may be rounded either way;
                # but what no rounding moves lies on the side where the comparison puts it.
                near &= spread > 0
            return near & (reference != candidate)
        # Nothing is known of how it came about: rounding decides where it gives the candidate's.
        reached = torch.zeros_like(reference, dtype=torch.bool)
        for run in runs:
            value = self.runs.complete(run, self.path)
            if isinstance(value, torch.Tensor) and value.shape == reference.shape:
                reached |= torch.eq(*promotable(value, candidate))
        return reached & (reference != candidate)

    def _value(self, observations: list[Observation] | None) -> Tensor | None:
        if observations is None or len(observations) <= self.call:
            return None
        value = self.runs.complete(observations[self.call], self.path)
        if not isinstance(value, torch.Tensor):
            return None
        if value.dtype in WIDE:
            # Not float64, so not lifted, unless it is what came in and was left alone.
            return value.to(WIDE[value.dtype]) if is_afterwards(self.path) else None
        return value
