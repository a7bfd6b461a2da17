"""What one call of compiled code and the same call of its reference disagree in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.comparing import Collected
from paritas.checking.evidence import ItemEvidence
from paritas.checking.explaining import Explainer, likely
from paritas.checking.noise import is_inexact
from paritas.checking.observing import AFTER, Observation
from paritas.numerics.criterion import error_ratios, relative_difference
from paritas.numerics.device_differences import Apart, all_equal, differences
from paritas.numerics.findings import Aspect, Finding, Status
from paritas.numerics.flattening import flattened, is_dense
from paritas.numerics.metrics import pair_metrics, quickly_equal
from paritas.numerics.pairing import Checks, check_pair, match

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.checking.noise import NoiseRuns

CHECKS = Checks(device=True)
# What was measured to be noise explains later errors up to so many times as large.
MARGIN = 1.5
# Errors so many times the reference's own are measured anew each time.
MOST_LEARNED = 64.0
# Findings kept to be given again.
MOST_FINDINGS = 4096

Sizes = tuple[float, float]


class Experience:
    """What earlier calls of a graph taught about how compiled code and reference differ by noise.

    To tell noise from a fault takes a float64 run, and sometimes perturbed runs, many times the
    cost of the call. But how large the noise is, relative to the values or to the reference's own
    error, is a trait of the program: a later call that differs by no more needs no such runs.
    Nothing fails by experience.
    """

    def __init__(self) -> None:
        """Start with none."""
        # One for all calls of a graph: a wrong program is wrong in the same way each time.
        self.explainer = Explainer()
        self._differences: dict[str, Sizes] = {}
        self._ratios: dict[str, Sizes] = {}
        self._findings: dict[tuple[str, Status, torch.dtype, torch.Size], Finding] = {}

    def learn(self, path: str, difference: Sizes | None, ratios: Sizes | None) -> None:
        """Remember what was measured to be noise."""
        _grow(self._differences, path, difference)
        if ratios is not None and max(ratios) <= MOST_LEARNED:
            _grow(self._ratios, path, ratios)

    def explains_difference(self, path: str, difference: Sizes | None) -> bool:
        """Whether the two sides are no further apart than before, relative to their values."""
        return _within(difference, self._differences.get(path))

    def explains_errors(self, path: str, ratios: Sizes | None) -> bool:
        """Whether the candidate's errors over the reference's own are no larger than before."""
        return _within(ratios, self._ratios.get(path))

    def finding(self, path: str, status: Status, dtype: torch.dtype, shape: torch.Size) -> Finding:
        """Of a value that passes: the same one as long as nothing changes."""
        key = (path, status, dtype, shape)
        known = self._findings.get(key)
        if known is None:
            if len(self._findings) >= MOST_FINDINGS:
                self._findings.clear()  # of a graph whose sizes change, say
            known = self._findings[key] = Finding(
                path=path,
                aspect=Aspect.VALUE,
                status=status,
                dtype=str(dtype).removeprefix("torch."),
                shape=tuple(shape),
            )
        return known


def _grow(table: dict[str, Sizes], path: str, sizes: Sizes | None) -> None:
    if sizes is not None:
        worst, rms = table.get(path, (0.0, 0.0))
        table[path] = (max(worst, sizes[0]), max(rms, sizes[1]))


def _within(sizes: Sizes | None, known: Sizes | None) -> bool:
    if sizes is None or known is None:
        return False
    return sizes[0] <= MARGIN * known[0] and sizes[1] <= MARGIN * known[1]


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
        alike = {
            name: (_plain(candidate[name]), _plain(value))
            for name, value in reference.items()
            if name in candidate and _comparable(value, candidate[name])
        }
        measured = dict(zip(alike, differences(list(alike.values())), strict=True))
        for name, value in reference.items():
            if name not in candidate:
                self._add(name, Aspect.STRUCTURE, "the compiled code does not give it")
                continue
            self.compare_value(name, value, candidate[name], measured.get(name))
        for name in candidate:
            if name not in reference:
                self._add(name, Aspect.STRUCTURE, "the compiled code gives it, the graph does not")

    def compare_value(
        self, name: str, reference: Any, candidate: Any, measured: Apart | None = None
    ) -> None:
        """Compare one value; `measured` if it has been already, with others."""
        if reference is None and candidate is None:
            return
        if _has_parts(reference) or _has_parts(candidate):
            self._compare_parts(name, reference, candidate)
            return
        self.out.compared += 1
        difference: Sizes | None = None
        ratios: Sizes | None = None
        if measured is not None or _comparable(reference, candidate):
            reference, candidate = _plain(reference), _plain(candidate)
            same = quickly_equal(reference, candidate) if measured is None else measured.identical
            if same:
                self._add_pass(name, Status.IDENTICAL, reference)
                return
            difference = measured.sizes if measured else relative_difference(candidate, reference)
            if self.experience.explains_difference(name, difference):
                self._add_pass(name, Status.EQUIVALENT, reference)
                return
            arbiter = ItemEvidence(self.runs, name).arbiter()
            ratios = None if arbiter is None else error_ratios(candidate, reference, arbiter)
            if self.experience.explains_errors(name, ratios):
                self.experience.learn(name, difference, None)
                self._add_pass(name, Status.EQUIVALENT, reference)
                return
        self._judge(name, _plain(reference), _plain(candidate), difference, ratios)

    def _compare_parts(self, name: str, reference: Any, candidate: Any) -> None:
        """Compare tensors that are not dense by kind, then part by part."""
        left, right = flattened(_plain(reference), name), flattened(_plain(candidate), name)
        matching = match(left, right, CHECKS)
        for finding in matching.findings:
            self._add(finding.path, finding.aspect, finding.reason)
        for path, one, other in matching.pairs:
            self.compare_value(path, one, other)

    def _judge(
        self,
        name: str,
        reference: Any,
        candidate: Any,
        difference: Sizes | None,
        ratios: Sizes | None,
    ) -> None:
        """Ask for all there is to know of a value that experience does not explain."""
        path = f"{self.label}: {name}"
        evidence = ItemEvidence(self.runs, name)
        findings, notes = check_pair(path, reference, candidate, CHECKS, evidence)
        if all(f.status in {Status.EQUIVALENT, Status.IDENTICAL} for f in findings):
            self.experience.learn(name, difference, ratios)
        else:
            findings = self._explained(findings, reference, candidate, evidence)
        self.out.findings += findings
        self.out.notes += notes

    def _explained(
        self, findings: list[Finding], reference: Any, candidate: Any, evidence: ItemEvidence
    ) -> list[Finding]:
        """With what kind of wrong they are; an input that was to be changed may be stale."""
        from paritas.diagnosis.cases import Context

        explainer = self.experience.explainer
        given = self.runs.given()
        before = given.get(evidence.path.removesuffix(AFTER))
        earlier: dict[str, Tensor] = {}
        if evidence.path.endswith(AFTER) and isinstance(before, torch.Tensor):
            earlier["what it was before the call"] = before
        context = Context(named=likely(given, reference), earlier=earlier)
        found = explainer.explain(findings, reference, candidate, evidence, context)
        self.out.notes += explainer.notes
        explainer.notes.clear()
        return found

    def compare_strides(
        self, reference: Observation, candidate: Observation, promised: dict[str, tuple[int, ...]]
    ) -> None:
        """Compare the strides of outputs that the user sees; `promised` holds what was traced."""
        for name, traced in promised.items():
            if name not in candidate.outputs:
                continue
            mine, theirs = _strides(candidate.outputs[name]), _strides(reference.outputs[name])
            if mine is None or theirs is None:
                continue
            shape = candidate.outputs[name].shape
            if shape != reference.outputs[name].shape:
                continue  # told already
            if any(_same_strides(shape, mine, other) for other in (theirs, traced)):
                continue
            self._add(name, Aspect.STRIDE, f"strides {list(mine)} instead of {list(theirs)}")

    def compare_aliases(
        self,
        reference: Observation,
        candidate: Observation,
        visible: set[str],
        donated: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """Compare which visible outputs share memory, and with what; donated inputs may be used."""

        def seen(observation: Observation) -> set[tuple[str, str]]:
            shared = {(a, b) for a, b in observation.aliases if b in visible}
            # Two outputs that share memory matter only if the user sees both.
            shared = {(a, b) for a, b in shared if a not in observation.outputs or a in visible}
            return {(a, b) for a, b in shared if a not in donated}

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

    def compare_untouched(self, inputs: dict[str, tuple[Tensor, Any]]) -> None:
        """Report inputs, before and after, that were written to though the graph does not."""
        kept = {name: pair for name, pair in inputs.items() if isinstance(pair[1], torch.Tensor)}
        pairs = [(_plain(before), _plain(after)) for before, after in kept.values()]
        for name, pair, same in zip(kept, pairs, all_equal(pairs), strict=True):
            if same:
                continue
            self.out.findings.append(
                Finding(
                    path=f"{self.label}: {name}{AFTER}",
                    aspect=Aspect.VALUE,
                    status=Status.DIFFERENT,
                    reason="the compiled code writes to this input; the graph leaves it alone",
                    metrics=pair_metrics(*pair),
                )
            )

    def _add_pass(self, name: str, status: Status, value: Tensor) -> None:
        self.out.findings.append(
            self.experience.finding(f"{self.label}: {name}", status, value.dtype, value.shape)
        )

    def _add(self, name: str, aspect: Aspect, reason: str) -> None:
        self.out.compared += 1
        self.out.add(f"{self.label}: {name}", aspect, Status.DIFFERENT, reason)


def _comparable(reference: Any, candidate: Any) -> bool:
    """Whether both are floating tensors of one kind, so that values alone are left to compare."""
    return (
        is_inexact(reference)
        and isinstance(candidate, torch.Tensor)
        and reference.dtype is candidate.dtype
        and reference.shape == candidate.shape
        and reference.device == candidate.device
        and is_dense(reference)
        and is_dense(candidate)
    )


def _has_parts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_dense(value)


def _plain(value: Any) -> Any:
    # What autograd does not follow is plain already, but for a subclass.
    if type(value) is torch.Tensor and not value.requires_grad:
        return value
    return value.detach() if isinstance(value, torch.Tensor) else value


def _strides(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return tuple(value.stride())


def _same_strides(shape: torch.Size, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Strides of dimensions of length one say nothing, nor do any of an empty tensor."""
    if 0 in shape:
        return True
    if len(left) != len(right):
        return False
    return all(a == b for size, a, b in zip(shape, left, right, strict=True) if size > 1)
