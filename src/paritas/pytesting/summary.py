"""The lines that pytest prints at its end: how many verdicts of which status, and what failed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paritas.pytesting.golden_places import test_folder, unused_goldens
from paritas.pytesting.outcomes import OUTSIDE, outcomes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.pytesting.options import Options
    from paritas.pytesting.outcomes import Outcome
    from paritas.pytesting.session import Account, Session

__all__ = ["Told", "summary_lines", "tell"]

# Gravest first. Spelled out, because the list itself lives where torch is imported.
STATUSES = ("different", "degraded", "unverified", "unstable", "equivalent", "identical")
MOST_SHOWN = 20
_IN_CI = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "TF_BUILD")


class Told(NamedTuple):
    """One outcome and the test that it is of."""

    test: str
    outcome: Outcome


def tell(terminal: Any, reports: Sequence[Any], session: Session) -> None:
    """Print the summary, and write the list of pages.

    Args:
        terminal: pytest's reporter.
        reports: of every phase of every test, and of what was collected.
    """
    told = [
        Told(report.nodeid, outcome)
        for report in reports
        if getattr(report, "when", "") == "teardown"  # which has those of all phases
        for outcome in outcomes_in(report.user_properties)
    ]
    passed = [
        report.nodeid
        for report in reports
        if getattr(report, "when", "") == "call" and report.outcome == "passed"
    ]
    options = session.options
    lines = summary_lines(told, passed, session.account, options)
    if options.report is not None:
        pages = [*told, *(Told(OUTSIDE, outcome) for outcome in session.account.outside)]
        if any(one.outcome.page for one in pages):
            from paritas.pytesting.pages import write_index

            write_index(options.report, pages)
    if lines:
        terminal.section("paritas")
        for line in lines:
            terminal.line(line)


def summary_lines(
    told: Sequence[Told], passed: Sequence[str], account: Account, options: Options
) -> list[str]:
    """Nothing where nothing was asked.

    Args:
        told: of every test of the run.
        passed: tests that passed.
        account: what no single test can tell.
        options: of the run.
    """
    everything = [*told, *(Told(OUTSIDE, outcome) for outcome in account.outside)]
    lines = [*_verdicts(everything), *_guarded(everything, options), *_goldens(everything)]
    lines += [f"note: {note}" for note in account.notes]
    lines += _failures(everything)
    lines += _pages(everything, options)
    lines += _unused(everything, passed, account, options)
    return lines


def _verdicts(told: Sequence[Told]) -> Iterator[str]:
    judged = [one for one in told if one.outcome.enabled]
    off = len(told) - len(judged)
    if judged:
        counts = Counter(one.outcome.status for one in judged)
        each = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        tests = _counted(len({one.test for one in judged}), "test")
        yield f"{_counted(len(judged), 'verdict')} in {tests}: {each}"
    if off:
        yield f"{_counted(off, 'check')} switched off: nothing was compared there"


def _guarded(told: Sequence[Told], options: Options) -> Iterator[str]:
    guards = [one.outcome for one in told if one.outcome.kind in {"guard", "suite guard"}]
    if guards:
        graphs, calls, checked = (
            sum(getattr(outcome, name) for outcome in guards)
            for name in ("graphs", "calls", "checked")
        )
        called = _counted(calls, "call")
        yield f"guarded: {_counted(graphs, 'graph')}, {checked} of {called} checked"
    elif options.guard:
        yield "guarded: nothing, because no test called anything that torch.compile made"


def _goldens(told: Sequence[Told]) -> Iterator[str]:
    goldens = [one for one in told if one.outcome.kind == "golden"]
    new = [one for one in goldens if one.outcome.written]
    if not new:
        return
    counts = Counter(one.outcome.written for one in new)
    each = ", ".join(f"{counts[word]} {word}" for word in ("written", "changed") if counts[word])
    yield f"goldens: {each}, {len(goldens) - len(new)} kept as they are"
    for one in new[:MOST_SHOWN]:
        was = f" (it was off: {one.outcome.worst})" if one.outcome.worst else ""
        yield f"  {one.outcome.written}: {one.outcome.golden}{was}"
    if len(new) > MOST_SHOWN:
        yield f"  and {len(new) - MOST_SHOWN} more"
    if any(os.environ.get(name) for name in _IN_CI):
        yield "  this looks like a build server: goldens are lost there unless they are committed"


def _failures(told: Sequence[Told]) -> Iterator[str]:
    failed = [one for one in told if one.outcome.enabled and not one.outcome.passed]
    for test, outcome in failed[:MOST_SHOWN]:
        what = f"{outcome.kind} {outcome.name}".strip()
        yield f"{outcome.status}: {test} ({what}) {outcome.worst}".rstrip()
    if len(failed) > MOST_SHOWN:
        yield f"and {len(failed) - MOST_SHOWN} more that do not pass"


def _pages(told: Sequence[Told], options: Options) -> Iterator[str]:
    pages = [one.outcome.page for one in told if one.outcome.page]
    if pages and options.report is not None:
        index = os.path.relpath(options.report / "index.html", Path.cwd())
        yield f"{_counted(len(pages), 'page')} about what does not pass: {index}"


def _unused(
    told: Sequence[Told], passed: Sequence[str], account: Account, options: Options
) -> Iterator[str]:
    used = {options.root / one.outcome.golden for one in told if one.outcome.golden}
    used = {Path(os.path.normpath(path)) for path in used}
    folders = [test_folder(options.root, options.golden_dir, test) for test in passed]
    whole = [(Path(file), {Path(test) for test in tests}) for file, tests in account.files.items()]
    unused = unused_goldens(folders, whole, used)
    for path in unused[:MOST_SHOWN]:
        near = os.path.relpath(path, options.root)
        yield f"unused golden: {near}; no test asks for it, so delete it or find out why"
    if len(unused) > MOST_SHOWN:
        yield f"and {len(unused) - MOST_SHOWN} more goldens that no test asks for"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
