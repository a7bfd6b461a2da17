"""What one process saw of its compiled code, and one report made of several."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

import msgspec

from paritas.errors import ParitasError
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.reporting.guard_summary import GraphCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.cli.ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Report:
    """What one process saw."""

    graphs: tuple[GraphCounts, ...]
    verdict: Verdict

    def to_json(self) -> bytes:
        """Encode; `from_json` gives back an equal report."""
        text = self.verdict.to_json().decode()
        return msgspec.json.encode({"graphs": self.graphs, "verdict": text})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Decode; what cannot be read becomes a report that says so."""
        try:
            content = msgspec.json.decode(data)
            graphs = msgspec.convert(content["graphs"], tuple[GraphCounts, ...])
            return cls(graphs, Verdict.from_json(content["verdict"]))
        except (msgspec.MsgspecError, ParitasError, KeyError, TypeError) as error:
            reason = f"what it handed in cannot be read: {error}"
            return cls((), Verdict(findings=(unverified("report", reason),)))


def unverified(path: str, reason: str, advice: str = "") -> Finding:
    """A finding about something that kept the program from being checked."""
    return Finding(
        path=path,
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=reason,
        advice=advice,
    )


def merge_ranks(ranks: Ranks, reports: Mapping[int, Report]) -> Report:
    """One report over all ranks of this machine; one that is missing is unverified."""
    graphs: list[GraphCounts] = []
    verdicts = []
    for rank in ranks.here:
        label = f"rank {rank}"
        if rank in reports:
            graphs += [
                msgspec.structs.replace(graph, label=f"{label}: {graph.label}")
                for graph in reports[rank].graphs
            ]
            verdicts.append(_labelled(reports[rank].verdict, label))
        else:
            verdicts.append(_silent(label))
    verdict = Verdict.merge(verdicts)
    if len(ranks.here) < ranks.world:
        note = (
            f"this is about {_span(ranks.here)} of {ranks.world}, those on this machine; the "
            "first rank of each other machine tells of its own"
        )
        verdict = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return Report(tuple(graphs), verdict)


def _span(here: range) -> str:
    return f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"


def _labelled(verdict: Verdict, label: str) -> Verdict:
    def named(items: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{label}: {item}" for item in items)

    coverage = verdict.coverage
    # Merged with its own silence told, which gets the label too.
    spoken = Verdict.merge([verdict])
    return msgspec.structs.replace(
        spoken,
        findings=tuple(
            msgspec.structs.replace(finding, path=f"{label}: {finding.path}")
            for finding in spoken.findings
        ),
        coverage=Coverage(
            compared=coverage.compared,
            skipped=named(coverage.skipped),
            unmatched=named(coverage.unmatched),
        ),
        notes=named(verdict.notes),
    )


def _silent(label: str) -> Verdict:
    reason = "it handed in no report in time: it was killed, or is still running"
    return Verdict(findings=(unverified(label, reason),))
