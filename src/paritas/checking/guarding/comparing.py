"""What one call of compiled code and the same call of its reference disagree in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.comparing import Collected
from paritas.checking.evidence import ItemEvidence
from paritas.checking.observing import AFTER, Observation
from paritas.numerics.criterion import rms, rms_difference
from paritas.numerics.findings import Aspect, Finding, Status
from paritas.numerics.metrics import bitwise_equal, pair_metrics
from paritas.numerics.pairing import Checks, check_pair

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.checking.noise import NoiseRuns

CHECKS = Checks(device=True)
# A noise so many times the reference's own error is measured anew each time.
MOST_LEARNED = 64.0


class Experience:
    """What earlier calls of a graph taught: how large noise is over the reference's own error.

    Measuring noise takes perturbed runs, many times the cost of the call. The ratio is a trait of
    the program (a sum added up in another order), so that later calls begin with the ratio of
    earlier ones; only what that does not explain is measured again. Nothing fails by experience.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._ratios: dict[tuple[str, float], float] = {}

    def learn(self, path: str, unit: float, spread: Tensor, own_error: float) -> None:
        """Remember a measured spread."""
        measured = rms(spread)
        if own_error > 0 and math.isfinite(measured):
            self._ratios[path, unit] = measured / own_error

    def expect(self, path: str, unit: float, like: Tensor, own_error: float) -> Tensor | None:
        """The spread that earlier calls lead to expect, or None."""
        ratio = self._ratios.get((path, unit))
        if ratio is None or not 0 < ratio <= MOST_LEARNED:
            return None
        return torch.full(like.shape, ratio * own_error, dtype=torch.float64, device=like.device)


class GuardEvidence(ItemEvidence):
    """Evidence about one item of a call, with the experience of earlier calls."""

    def __init__(self, runs: NoiseRuns, path: str, experience: Experience) -> None:
        """See `ItemEvidence`."""
        super().__init__(runs, path)
        self.experience = experience

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """The measured spread; the expected one where a single run is asked for."""
        arbiter = self.arbiter()
        own_error = 0.0
        if arbiter is not None:
            reference = self.runs.complete(self.runs.native[self.call], self.path)
            own_error = rms_difference(reference, arbiter)
            if runs == 1:
                expected = self.experience.expect(self.path, unit, arbiter, own_error)
                if expected is not None:
                    return expected
        measured = super().spread(unit, runs)
        if measured is not None:
            self.experience.learn(self.path, unit, measured, own_error)
        return measured


class CallComparer:
    """Compares one call, item by item; every path is preceded by the graph's label."""

    def __init__(self, runs: NoiseRuns, label: str, experience: Experience) -> None:
        """`runs` holds what the reference did."""
        self.runs = runs
        self.label = label
        self.experience = experience
        self.out = Collected()

    def compare_values(self, reference: dict[str, Any], candidate: dict[str, Any]) -> None:
        """Compare named values; one that only one side has is a finding."""
        for name, value in reference.items():
            if name not in candidate:
                self._add(name, Aspect.STRUCTURE, "the compiled code does not give it")
                continue
            self.compare_value(name, value, candidate[name])
        for name in candidate:
            if name not in reference:
                self._add(name, Aspect.STRUCTURE, "the compiled code gives it, the graph does not")

    def compare_value(self, name: str, reference: Any, candidate: Any) -> None:
        """Compare one value."""
        if reference is None and candidate is None:
            return
        self.out.compared += 1
        evidence = GuardEvidence(self.runs, name, self.experience)
        path = f"{self.label}: {name}"
        findings, notes = check_pair(path, _plain(reference), _plain(candidate), CHECKS, evidence)
        self.out.findings += findings
        self.out.notes += notes

    def compare_strides(
        self, reference: Observation, candidate: Observation, promised: dict[str, tuple[int, ...]]
    ) -> None:
        """Compare the strides of outputs that the user sees; `promised` holds what was traced."""
        for name, traced in promised.items():
            mine, theirs = candidate.strides.get(name), reference.strides.get(name)
            value = candidate.outputs.get(name)
            if mine is None or theirs is None or not isinstance(value, torch.Tensor):
                continue
            if any(_same_strides(value.shape, mine, other) for other in (theirs, traced)):
                continue
            self._add(name, Aspect.STRIDE, f"strides {list(mine)} instead of {list(theirs)}")

    def compare_aliases(
        self, reference: Observation, candidate: Observation, visible: set[str]
    ) -> None:
        """Compare which visible outputs share memory, and with what."""

        def seen(observation: Observation) -> set[tuple[str, str]]:
            shared = {(a, b) for a, b in observation.aliases if b in visible}
            # Two outputs that share memory matter only if the user sees both.
            return {(a, b) for a, b in shared if a not in observation.outputs or a in visible}

        left, right = seen(reference), seen(candidate)
        for one, other in sorted(right - left):
            self._add(other, Aspect.ALIAS, f"shares memory with {one}, which the graph's does not")
        for one, other in sorted(left - right):
            self._add(other, Aspect.ALIAS, f"does not share memory with {one}, as the graph's does")

    def compare_random(self, reference: Observation, candidate: Observation) -> None:
        """Compare where the random generators stand after the call."""
        left, right = reference.rng_after, candidate.rng_after
        if left is not None and right is not None and not left.same_torch(right):
            reason = "leaves torch's random generators in another state than the graph does"
            self._add("random numbers", Aspect.RNG, reason)

    def compare_untouched(self, name: str, before: Tensor, after: Tensor) -> None:
        """Report an input that was written to, though the graph leaves it alone."""
        if bitwise_equal(before.detach(), after.detach()):
            return
        self.out.findings.append(
            Finding(
                path=f"{self.label}: {name}{AFTER}",
                aspect=Aspect.VALUE,
                status=Status.DIFFERENT,
                reason="the compiled code writes to this input; the graph leaves it alone",
                metrics=pair_metrics(before.detach(), after.detach()),
            )
        )

    def _add(self, name: str, aspect: Aspect, reason: str) -> None:
        self.out.compared += 1
        self.out.add(f"{self.label}: {name}", aspect, Status.DIFFERENT, reason)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _same_strides(shape: torch.Size, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Strides of dimensions of length one say nothing, nor do any of an empty tensor."""
    if 0 in shape:
        return True
    if len(left) != len(right):
        return False
    return all(a == b for size, a, b in zip(shape, left, right, strict=True) if size > 1)
