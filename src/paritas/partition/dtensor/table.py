"""DTensor's rules over a set of common operators, as a table: `docs/dtensor_rules.md`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.numerics.findings import Status
from paritas.partition.dtensor.claims import Claim, examine_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.partition.dtensor.examples import Example

__all__ = ["Row", "examine_example", "make_table"]

# Wrong claims of one operator that are told one by one.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """How DTensor did on one operator.

    Attributes:
        claims: every way to place the arguments.
        failure: why the operator could not be examined at all.
    """

    name: str
    claims: tuple[Claim, ...] = ()
    failure: str = ""

    def count(self, outcome: str) -> int:
        """How many ways ended like that."""
        return sum(claim.outcome == outcome for claim in self.claims)

    @property
    def wrong(self) -> list[Claim]:
        """The claims that are not true."""
        bad = {Status.DIFFERENT, Status.DEGRADED}
        return [c for c in self.claims if c.verdict is not None and c.verdict.status in bad]

    @property
    def right(self) -> int:
        """How many claims are true."""
        return sum(claim.verdict is not None and claim.verdict.passed for claim in self.claims)


def examine_example(example: Example, ranks: int = 2, seed: int = 0) -> Row:
    """Check all that DTensor claims of one operator."""
    try:
        claims = examine_dtensor(
            example.op,
            example.args,
            example.kwargs,
            ranks=ranks,
            seed=seed,
            within=example.within,
        )
        return Row(example.name, tuple(claims))
    except UsageError as error:
        return Row(example.name, failure=str(error))


def make_table(rows: Iterable[Row]) -> str:
    """A Markdown table, a line for each operator, and below it the first wrong claims of each."""
    lines = [
        "| operator | ways | claimed | right | wrong | moved first | refused |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    details: list[str] = []
    for row in rows:
        if row.failure:
            lines.append(f"| {row.name} | not examined: {row.failure} | | | | | |")
            continue
        wrong = row.wrong
        figures = (
            len(row.claims),
            row.count("claimed"),
            row.right,
            f"**{len(wrong)}**" if wrong else 0,
            row.count("redistributed"),
            row.count("refused"),
        )
        lines.append(f"| `{row.name}` | " + " | ".join(map(str, figures)) + " |")
        shown = wrong[:_SHOWN]
        details += [f"- `{row.name}`: `{claim.words}`: {_first(claim)}" for claim in shown]
        if len(wrong) > len(shown):
            details.append(f"- `{row.name}`: and {len(wrong) - len(shown)} more")
    return "\n".join([*lines, "", *(details or ["No claim was found wrong."])]) + "\n"


def _first(claim: Claim) -> str:
    if claim.verdict is None or not claim.verdict.failures:
        return ""
    finding = claim.verdict.failures[0]
    item = finding.path.removeprefix(f"{claim.words}: ")
    more = len(claim.verdict.failures) - 1
    return f"{item}: {finding.reason}" + (f" (and {more} more)" if more else "")
