"""The failures of a verdict by their causes: where each starts, and what results from it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.core.results.findings import Aspect, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.core.results.findings import Finding, Origin


@dataclasses.dataclass(frozen=True)
class Cause:
    """A failing finding, and the findings that result from it.

    Attributes:
        start: the finding where the difference starts, or one of which that is not known.
        results: the others; empty if nothing is known to result from it.
    """

    start: Finding
    results: tuple[Finding, ...] = ()

    @property
    def is_located(self) -> bool:
        """Whether it is known where it starts."""
        return is_located(self.start)

    @property
    def result_names(self) -> tuple[str, ...]:
        """The results by name, without the gradients of a forward pass that is wrong already."""
        return self._names(
            finding for finding in self.results if not self._is_behind_forward(finding)
        )

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """The gradients of a forward pass that is wrong already.

        They follow from it, but whether they also have a fault of their own cannot be seen.
        """
        return self._names(filter(self._is_behind_forward, self.results))

    def _is_behind_forward(self, finding: Finding) -> bool:
        is_forward = any(
            not result_finding.item.kind.is_gradient for result_finding in self.results
        )
        return is_forward and finding.item.kind.is_gradient

    def _names(self, findings: Iterable[Finding]) -> tuple[str, ...]:
        """By name, without the graph if it is that of the start."""
        start_place = self.start.item.place
        items = [
            finding.item.without_place
            if start_place and finding.item.place == start_place
            else finding.item
            for finding in findings
        ]
        return tuple(dict.fromkeys(item.text for item in items))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The start and its results."""
        return (self.start, *self.results)


def group_causes(findings: Iterable[Finding]) -> list[Cause]:
    """Group failing findings: those that are located first, each with what results from it.

    A finding results from another one if it says so (`cause`), or if it is a wrong value with the
    same origin. Findings of a guarded graph may say nothing: wrong values of a graph result from
    the first wrong value that was located in it.
    """
    failing_findings = list(findings)
    by_origin: dict[tuple[str, Origin | None], Finding] = {}
    starts = [
        failing_finding
        for failing_finding in failing_findings
        if is_located(failing_finding) and _is_first(failing_finding, by_origin)
    ]
    by_path = {start_finding.path: start_finding for start_finding in reversed(starts)}
    by_graph = {
        start_finding.item.place: start_finding
        for start_finding in reversed(starts)
        if start_finding.item.graph and start_finding.aspect is Aspect.VALUE
    }
    results: dict[int, list[Finding]] = {id(start_finding): [] for start_finding in starts}
    alone: list[Finding] = []
    for finding in failing_findings:
        if id(finding) in results:
            continue
        start = by_path.get(finding.cause)
        if start is None and not finding.cause and _is_wrong_value(finding):
            graph = by_graph.get(finding.item.place)
            start = (
                graph
                if finding.origin is None
                else by_origin.get((finding.item.place, finding.origin))
            )
        (alone if start is None else results[id(start)]).append(finding)
    located = [Cause(start_finding, tuple(results[id(start_finding)])) for start_finding in starts]
    return [*located, *map(Cause, alone)]


def is_located(finding: Finding) -> bool:
    """Whether it says where a difference starts; what could not be checked explains nothing."""
    has_verified_origin = finding.origin is not None and finding.status is not Status.UNVERIFIED
    return has_verified_origin and not finding.cause


def _is_first(finding: Finding, by_origin: dict[tuple[str, Origin | None], Finding]) -> bool:
    """Whether no wrong value before it has the same origin in the same graph."""
    if not _is_wrong_value(finding):
        return True
    return by_origin.setdefault((finding.item.place, finding.origin), finding) is finding


def _is_wrong_value(finding: Finding) -> bool:
    return finding.status.is_wrong and finding.aspect is Aspect.VALUE
