"""Verdicts and findings in plain words: what failed, how many, the worst, where, what to do."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.core.results.causes import group_causes
from paritas.core.results.findings import Aspect, OriginKind, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paritas.core.results.causes import Cause
    from paritas.core.results.findings import Finding, Origin, Score, Verdict

MOST_SHOWN = 10
# Findings of which it is not known where they start: the others have one line each.
MOST_IN_FULL = 3
_UNITS = ("B", "kB", "MB", "GB", "TB")
_THOUSAND = 1000
_SPAN = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")

MEANING = {
    Status.IDENTICAL: "is equal bit for bit",
    Status.EQUIVALENT: "differs by rounding only",
    Status.UNSTABLE: "differs where the reference's own rounding decides",
    Status.UNVERIFIED: "could not be compared",
    Status.DEGRADED: "is the same function, but less accurate than the reference's noise allows",
    Status.DIFFERENT: "computes something else",
}


def verdict_text(verdict: Verdict) -> str:
    """The whole verdict as lines of text."""
    lines = [headline(verdict)]
    causes = group_causes(told_findings(verdict))
    for cause_number, cause in enumerate(causes[:MOST_SHOWN]):
        in_full = cause.is_located or cause_number < MOST_IN_FULL
        lines += cause_lines(cause) if in_full else [_brief_line(cause.start)]
    omitted_count = sum(len(cause.findings) for cause in causes[MOST_SHOWN:])
    if omitted_count:
        lines.append(f"  and {omitted_count} more")
    lines += [f"  not compared: {item}" for item in verdict.coverage.unmatched]
    lines += [f"  skipped: {item}" for item in verdict.coverage.skipped]
    lines += [f"  note: {note}" for note in verdict.notes]
    lines += [f"  next: {verdict.shrink_command}"] if verdict.shrink_command else []
    return "\n".join(lines)


def told_findings(verdict: Verdict) -> Sequence[Finding]:
    """What is told in words: the failures, or else what is unstable."""
    return verdict.failures or [f for f in verdict.findings if f.status is Status.UNSTABLE]


def cause_lines(cause: Cause) -> list[str]:
    """A cause as a few indented lines: its start, and its results in one line."""
    lines = finding_lines(cause.start)
    return [*lines, f"    {results_words(cause)}"] if cause.results else lines


def results_words(cause: Cause) -> str:
    """`as a result, also 2 values: output[0], gradient of x`; empty if nothing results from it."""
    names, gradients = cause.result_names, cause.gradient_names
    if not names:
        return ""
    words = f"as a result, also {count_things(len(names), 'value')}: {list_first(names)}"
    if not gradients:
        return words
    behind = f"{count_things(len(gradients), 'gradient')}, which may hide a fault of their own"
    return f"{words}; {behind}: {list_first(gradients)}"


def _brief_line(finding: Finding) -> str:
    heading = finding_lines(finding)[0]
    return f"{heading}; {finding.reason}" if finding.reason else heading


def headline(verdict: Verdict, *, identical: str = "") -> str:
    """The verdict in one line; `identical` replaces the meaning of that status."""
    if not verdict.enabled:
        return "not verified: comparison was switched off (enabled=False); both sides ran"
    compared = verdict.coverage.compared
    items = f"{count_things(compared, 'item')} compared"
    status = verdict.status
    if verdict.passed:
        meaning = identical if identical and status is Status.IDENTICAL else MEANING[status]
        warning = " (a warning, not a failure)" if status is Status.UNSTABLE else ""
        return f"{status.value}: the candidate {meaning}{warning}; {items}"
    failed = len(verdict.failures)
    if compared == 0 and not failed:
        return "unverified: nothing was compared"
    findings = count_things(failed, "finding")
    return f"{status.value}: the candidate {MEANING[status]}; {findings}, {items}"


def finding_text(finding: Finding) -> str:
    """One finding in at most three lines: what and by how much; what kind of wrong; where."""
    first = [f"{finding.status.value}: {item_words(finding)}"]
    first += filter(None, (value_words(finding), *size_words(finding)))
    causes = [finding.reason]
    if finding.diagnosis is not None:
        causes.append(finding.diagnosis.sentence)
    location_lines = [line.strip() for line in _place_lines(finding)]
    below = (
        "; ".join(filter(None, causes)),
        "; ".join(filter(None, (*location_lines, finding.advice))),
    )
    return "\n".join([", ".join(first), *(f"  {line}" for line in below if line)])


def item_words(finding: Finding) -> str:
    """The item, and the compared property unless that is its value."""
    if finding.aspect is Aspect.VALUE:
        return finding.path
    return f"{finding.path} ({finding.aspect.value})"


def value_words(finding: Finding) -> str:
    """Dtype and shape; empty if unknown."""
    if finding.dtype is None:
        return ""
    # The shape may be unknown, for example if only statistics of a tensor were kept.
    shape = "?" if finding.shape is None else ",".join(map(str, finding.shape))
    return f"{finding.dtype}[{shape}]"


def near_path(source: str) -> str:
    """A path relative to the current directory if it is below it."""
    return source.removeprefix(f"{Path.cwd()}{os.sep}")


def is_inexact(finding: Finding) -> bool:
    """Whether it is about floating or complex numbers, so that a difference has a size."""
    return finding.dtype is not None and ("float" in finding.dtype or "complex" in finding.dtype)


def deciding_score(finding: Finding) -> tuple[str, Score] | None:
    """The deciding score, with its run: the first that fails, else the native one."""
    scores = [("lifted", finding.lifted), ("native", finding.native)]
    present_scores = [(run, score) for run, score in scores if score is not None]
    failed = [(run, score) for run, score in present_scores if not score.passed]
    return failed[0] if failed else (present_scores[-1] if present_scores else None)


def deciding_excess(finding: Finding) -> float:
    """The deciding score in multiples of its limit; 0 without a score."""
    decided = deciding_score(finding)
    return 0.0 if decided is None else decided[1].excess


def deciding_figure(score: Score) -> tuple[str, float, float]:
    """The name, value and limit of the figure that decided."""
    if score.passed or not score.max_z <= score.max_limit:
        return "worst", score.max_z, score.max_limit
    if score.rms_z <= score.rms_limit and score.slice_z is not None:
        return "slice", score.slice_z, score.slice_limit or 0.0
    return "rms", score.rms_z, score.rms_limit


def size_words(finding: Finding) -> list[str]:
    """How large the difference is, each number with its unit."""
    words = []
    metrics = finding.metrics
    if metrics is not None and metrics.nonfinite_mismatches:
        words.append(f"NaN or Inf in {metrics.nonfinite_mismatches} of {metrics.numel} elements")
    elif metrics is not None and metrics.mismatched:
        share = f"{metrics.mismatched} of {metrics.numel} elements differ"
        words.append(f"relative L2 {metrics.rel_l2:.2g}" if is_inexact(finding) else share)
    decided = deciding_score(finding)
    if decided is not None:
        run, score = decided
        name, value, limit = deciding_figure(score)
        words.append(f"{name} {value:.2g} times the noise (allowed {limit:.2g}, {run} run)")
    return words


def finding_lines(finding: Finding) -> list[str]:
    """One finding as a few indented lines."""
    lines = [f"  {finding.path}: {finding.status.value} ({finding.aspect.value})"]
    if finding.reason:
        lines.append(f"    {finding.reason}")
    metrics = finding.metrics
    if metrics is not None and metrics.mismatched:
        share = 100 * metrics.mismatched / max(1, metrics.numel)
        inexact = finding.native is not None or finding.lifted is not None
        size = f"; relative L2 {metrics.rel_l2:.2g}" if inexact else ""
        lines.append(
            f"    {metrics.mismatched} of {metrics.numel} elements differ ({share:.3g} %){size}"
        )
        at = list(metrics.max_abs_index) if metrics.max_abs_index is not None else "[]"
        lines.append(
            f"    worst at {at}: candidate {metrics.max_abs_candidate:.9g}, "
            f"reference {metrics.max_abs_reference:.9g}"
        )
    for name, score in (("lifted", finding.lifted), ("native", finding.native)):
        if score is not None and not score.passed:
            lines.append(
                f"    {name}: worst error {score.max_z:.3g} times the noise (allowed "
                f"{score.max_limit:g}), rms {score.rms_z:.3g} (allowed {score.rms_limit:.3g}); "
                f"noise from {score.noise}"
            )
            if score.slice_z is not None and not score.slice_z <= (score.slice_limit or 0):
                lines.append(
                    f"    {name}: at {score.slice_index} along axis {score.slice_axis}, rms "
                    f"{score.slice_z:.3g} (allowed {score.slice_limit:.3g})"
                )
    if finding.diagnosis is not None and finding.diagnosis.sentence:
        lines.append(f"    {finding.diagnosis.sentence}")
    lines += _place_lines(finding)
    if finding.advice:
        lines.append(f"    {finding.advice}")
    return lines


def _place_lines(finding: Finding) -> list[str]:
    """Where it starts for the compiler, then in the user's code, then what removes it."""
    origin = finding.origin
    lines = [] if origin is None else [f"    {words}" for words in origin_words(origin)]
    source = finding.source or (origin.source if origin is not None else "")
    if source:
        lines.append(f"    at {source}")
    if origin is not None and origin.code:
        lines.append(f"      {origin.code}")
    if origin is not None and origin.chain:
        lines.append(f"    from there on: {chain_words(origin)}")
    if origin is not None and any(remedy not in finding.reason for remedy in origin.remedies):
        lines.append(
            f"    the difference disappears with the option {' or '.join(origin.remedies)}"
        )
    return lines


def call_words(origin: Origin) -> str:
    """The operator with its arguments; empty if it is unknown."""
    if not origin.operator or not origin.arguments:
        return origin.operator
    return f"{origin.operator}({', '.join(origin.arguments)})"


def chain_words(origin: Origin) -> str:
    """What the fault passes through; a long chain without its middle; may be empty."""
    chain = origin.chain
    if len(chain) > MOST_SHOWN:
        half = MOST_SHOWN // 2
        left_out = count_things(len(chain) - 2 * half, "more place")
        chain = (*chain[:half], f"({left_out})", *chain[-half:])
    return " -> ".join(chain)


def origin_words(origin: Origin) -> list[str]:
    """Where a difference starts; empty if only the graph is known."""
    inside = f" in module {origin.module}" if origin.module else ""
    called = f"{call_words(origin)}{inside}" if origin.operator else inside.strip()
    match origin.kind:
        case OriginKind.NODE:
            return [f"node {origin.name}: {called}" if called else f"node {origin.name}"]
        case OriginKind.FUSION:
            first = f"first of them: {called}"
            together = f"compiled together: {', '.join(origin.nodes or (origin.name,))}"
            return [together, *([first] if called else [])]
        case OriginKind.PASS:
            what = f"compiler pass {origin.name}"
        case OriginKind.PARTITION:
            what = "the split of the graph into forward and backward"
        case OriginKind.GRAPH:
            return [f"nearest operator: {called}"] if called else []
        case OriginKind.MODULE | OriginKind.TRAINING:
            which = ", ".join(map(str, origin.ranks))
            ranks = f", on rank{'s' * (len(origin.ranks) > 1)} {which}" if which else ""
            kind = f" ({origin.operator})" if origin.operator else ""
            plain = origin.kind is OriginKind.MODULE and origin.name
            where = f"module {origin.name}" if plain else f"the {origin.name or 'model itself'}"
            return [f"first in {where}{kind}{ranks}"]
    return [f"{what}: {called}" if called else what]


# --- Counts, lists and sizes ----------------------------------------------------------------------


def count_things(count: int, thing: str, *, thousands: str = "") -> str:
    """`1 call`, `36 calls`; with `thousands=","` also `12,000 calls`."""
    return f"{count:{thousands}} {thing}{'' if count == 1 else 's'}"


def status_counts(statuses: Iterable[str]) -> list[str]:
    """How many there are of each status, gravest first: `2 different`, `1 unverified`."""
    counts = Counter(statuses)
    return [f"{counts[status]} {status.value}" for status in reversed(Status) if counts[status]]


def list_first(items: Iterable[str], most: int = MOST_SHOWN, *, between: str = ", ") -> str:
    """The first few, and how many more there are: `a, b and 3 more`."""
    texts = list(items)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{between.join(texts[:most])}{more}"


def joined_ranges(spans: Iterable[int | tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Numbers and ranges (first, last), with adjoining ones joined."""
    joined: list[tuple[int, int]] = []
    for span in spans:
        first, last = (span, span) if isinstance(span, int) else span
        if joined and joined[-1][1] == first - 1:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return tuple(joined)


def ranges(spans: Iterable[int | tuple[int, int]]) -> str:
    """The same as text: `0-3, 7`."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in joined_ranges(spans))


def read_span(text: str) -> tuple[int, int] | None:
    """The first and last number of a number or range as users write it: `3`, `2-5`.

    None if it is something else. The first may be larger than the last: the range is empty then.
    """
    form = _SPAN.fullmatch(text)
    return None if form is None else (int(form[1]), int(form[2] or form[1]))


def size(count: float) -> str:
    """A number of bytes, with a unit."""
    for unit in _UNITS[:-1]:
        if abs(count) < _THOUSAND:
            return f"{count:.3g} {unit}"
        count /= _THOUSAND
    return f"{count:.3g} {_UNITS[-1]}"
