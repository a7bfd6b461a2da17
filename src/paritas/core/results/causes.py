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
        return self._names(one for one in self.results if not self._is_behind_forward(one))

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """The gradients of a forward pass that is wrong already.

        They follow from it, but whether they also have a fault of their own cannot be seen.
        """
        return self._names(filter(self._is_behind_forward, self.results))

    def _is_behind_forward(self, finding: Finding) -> bool:
        is_forward = any(not one.item.kind.is_gradient for one in self.results)
        return is_forward and finding.item.kind.is_gradient

    def _names(self, findings: Iterable[Finding]) -> tuple[str, ...]:
        """By name, without the graph if it is that of the start."""
        place = self.start.item.place
        items = [
            one.item.without_place if place and one.item.place == place else one.item
            for one in findings
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
    found = list(findings)
    by_origin: dict[tuple[str, Origin | None], Finding] = {}
    starts = [one for one in found if is_located(one) and _is_first(one, by_origin)]
    by_path = {one.path: one for one in reversed(starts)}
    by_graph = {
        one.item.place: one
        for one in reversed(starts)
        if one.item.graph and one.aspect is Aspect.VALUE
    }
    results: dict[int, list[Finding]] = {id(one): [] for one in starts}
    alone: list[Finding] = []
    for one in found:
        if id(one) in results:
            continue
        start = by_path.get(one.cause)
        if start is None and not one.cause and _is_wrong_value(one):
            graph = by_graph.get(one.item.place)
            start = graph if one.origin is None else by_origin.get((one.item.place, one.origin))
        (alone if start is None else results[id(start)]).append(one)
    located = [Cause(one, tuple(results[id(one)])) for one in starts]
    return [*located, *map(Cause, alone)]


def is_located(finding: Finding) -> bool:
    """Whether it says where a difference starts; what could not be checked explains nothing."""
    known = finding.origin is not None and finding.status is not Status.UNVERIFIED
    return known and not finding.cause


def _is_first(finding: Finding, by_origin: dict[tuple[str, Origin | None], Finding]) -> bool:
    """Whether no wrong value before it has the same origin in the same graph."""
    if not _is_wrong_value(finding):
        return True
    return by_origin.setdefault((finding.item.place, finding.origin), finding) is finding


def _is_wrong_value(finding: Finding) -> bool:
    return finding.status.is_wrong and finding.aspect is Aspect.VALUE
