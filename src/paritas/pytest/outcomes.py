"""How the checks of tests ended: where goldens lie, short outcomes, the summary at the end."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from paritas.errors import UsageError
from paritas.pytest import PROPERTY
from paritas.reports.files import write_verdict, write_whole
from paritas.results.findings import Status
from paritas.results.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import pytest

    from paritas.pytest import PluginOptions
    from paritas.pytest.session import RunAccount, Session
    from paritas.results.findings import Verdict


# --- Where goldens lie ----------------------------------------------------------------------------

GOLDEN = "golden"
# What a dump has at its top, by which a golden is known from a folder of them.
_RANK = "rank0"
_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]=-]+")
LONGEST_NAME = 80


def test_folder(root: Path, golden_dir: Path | None, test: str) -> Path:
    """The folder of a test's goldens.

    Args:
        root: what the name of the test is relative to.
        golden_dir: where goldens lie; None for a folder beside the test.
        test: its node id, `tests/test_model.py::TestFusion::test_norm[bfloat16]`.
    """
    file, _, name = test.partition("::")
    path = Path(file)
    inside = safe_name(name.replace("::", "."))
    if golden_dir is None:
        return root / path.parent / GOLDEN / path.stem / inside
    # What lies outside of the root is told apart by its hash alone.
    parts = path.with_suffix("").parts
    return golden_dir / safe_name("/".join(parts)) / inside


def golden_folder(tests: Path, name: str) -> Path:
    """The folder of one golden.

    Raises:
        UsageError: the name is none.
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"a golden needs a name, not {name!r}; give one that the test has once")
    return tests / safe_name(name)


def safe_name(text: str) -> str:
    """A name for a folder on any system; what had to be changed is told apart by its hash."""
    plain = _PLAIN.sub("_", text).strip(".")[:LONGEST_NAME]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def unused_goldens(
    passed: Iterable[Path], whole: Iterable[tuple[Path, Collection[Path]]], used: Collection[Path]
) -> list[Path]:
    """Goldens that no test asked for, as far as this run can tell.

    Args:
        passed: the folders of tests that passed: what they did not ask for, they no longer need.
        whole: per test file of which every test was collected, the folder of its goldens, and the
            folders of its tests: any other is of a test that is no more.
        used: the goldens that were asked for.
    """
    unused = [path for folder in passed for path in _goldens_below(folder) if path not in used]
    for folder, tests in whole:
        gone = [path for path in _folders(folder) if path not in tests]
        unused += [path for test in gone for path in _goldens_below(test)]
    return sorted(set(unused))


def _goldens_below(test: Path) -> list[Path]:
    return [path for path in _folders(test) if (path / _RANK).is_dir()]


def _folders(path: Path) -> list[Path]:
    return [below for below in path.iterdir() if below.is_dir()] if path.is_dir() else []


# --- One outcome, short enough to travel with the test's report -----------------------------------

# pytest hands `user_properties` on to JUnit XML, and xdist hands them to its controller: the
# summary is made of the same lines that a build server reads. Nothing here needs torch, so that a
# controller that runs no test stays light.

# A line is for a table or a build server: the whole verdict is in the test's own failure.
LONGEST_LINE = 300
# In place of a test, for what ran while none did.
OUTSIDE = "outside of tests"

CheckKind = Literal["verify", "guard", "golden", "suite guard"]


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One verdict in short.

    Attributes:
        kind: what gave it: `parity.verify`, `parity.guard`, `parity.golden` or `--paritas-guard`.
        status: the verdict's, as a word.
        passed: whether it counts as a pass.
        compared: how many items were compared.
        enabled: off, nothing was compared because that was asked for.
        name: of the golden, or of the guarded backend.
        worst: the gravest finding in one line, or "".
        graphs: how many compiled graphs were checked.
        calls: how many calls of them there were.
        checked: how many of those were checked.
        written: of a golden, `written` or `changed` where its files are new.
        golden: the folder of the golden, relative to the root of the run.
        page: the HTML page about it, relative likewise, or "".
    """

    kind: CheckKind
    status: str
    passed: bool
    compared: int = 0
    enabled: bool = True
    name: str = ""
    worst: str = ""
    graphs: int = 0
    calls: int = 0
    checked: int = 0
    written: Literal["", "written", "changed"] = ""
    golden: str = ""
    page: str = ""

    @property
    def what(self) -> str:
        """Which check it is of."""
        return f"{self.kind} {self.name}".strip()

    def encode(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()


def outcome_of(kind: CheckKind, verdict: Verdict) -> CheckOutcome:
    """A verdict in short."""
    failures = verdict.failures
    return CheckOutcome(
        kind=kind,
        status=verdict.status.value,
        passed=verdict.passed,
        compared=verdict.coverage.compared,
        enabled=verdict.enabled,
        worst=_worst_line(failures[0].path, failures[0].reason) if failures else "",
    )


def outcomes_in(properties: Iterable[tuple[str, object]]) -> Iterator[CheckOutcome]:
    """Those among the properties of a report."""
    for name, value in properties:
        if name == PROPERTY and isinstance(value, str):
            yield msgspec.json.decode(value, type=CheckOutcome)


def _worst_line(path: str, reason: str) -> str:
    words = " ".join(f"{path}: {reason}".split()) if reason else path
    return words if len(words) <= LONGEST_LINE else f"{words[: LONGEST_LINE - 1]}…"


# --- Writing outcomes down ------------------------------------------------------------------------


class Recorder:
    """Takes the verdicts of one test, in the order in which they are given."""

    def __init__(self, item: pytest.Item, options: PluginOptions) -> None:
        """`item` is the test."""
        self.item = item
        self.options = options

    def record(self, kind: CheckKind, verdict: Verdict, **facts: Any) -> CheckOutcome:
        """Attach a verdict to the test's report; `facts` are further fields of the outcome."""
        number = sum(name == PROPERTY for name, _ in self.item.user_properties)
        title = self.item.nodeid
        outcome = short_outcome(kind, verdict, self.options, title, number, **facts)
        self.item.user_properties.append((PROPERTY, outcome.encode()))
        return outcome


def short_outcome(
    kind: CheckKind, verdict: Verdict, options: PluginOptions, title: str, number: int, **facts: Any
) -> CheckOutcome:
    """A verdict in short, with a page of its own if it fails and pages were asked for.

    Args:
        title: what the page is about, the node id of the test.
        number: which verdict of the test it is, from 0.
        facts: further fields of the outcome.
    """
    outcome = msgspec.structs.replace(outcome_of(kind, verdict), **facts)
    if options.report is None or outcome.passed or not outcome.enabled:
        return outcome
    page = write_page(options.report, verdict, outcome, title, number)
    return msgspec.structs.replace(outcome, page=os.path.relpath(page, options.root))


# --- A page and a JSON file for each verdict that does not pass, and a list of all ----------------


def write_page(
    folder: Path, verdict: Verdict, outcome: CheckOutcome, test: str, number: int
) -> Path:
    """Write the page of one verdict, and beside it the JSON with every finding.

    Args:
        folder: where it goes; it is made.
        test: the node id.
        number: which verdict of the test it is.
    """
    from paritas.reports.pages import verdict_page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--paritas-report {str(folder)!r}: {error.strerror or error}; name a folder"
        raise UsageError(message) from error
    path = folder / f"{safe_name(test.replace('/', '.').replace('::', '.'))}-{number}.html"
    beside = path.with_suffix(".json")
    write_verdict(beside, verdict)
    page = verdict_page(verdict, test, outcome.what, beside.name)
    write_whole(path, page.encode(errors="backslashreplace"))
    return path


def write_index(folder: Path, told: Sequence[ReportedOutcome]) -> None:
    """Write the list of the pages of a run."""
    from paritas.reports.pages import PageLink, index_page

    links = [
        PageLink(
            test=one.test,
            what=one.outcome.what,
            status=one.outcome.status,
            worst=one.outcome.worst,
            href=one.outcome.page.replace("\\", "/").rpartition("/")[2],
        )
        for one in told
        if one.outcome.page
    ]
    page = index_page(links, verdicts=len(told))
    write_whole(folder / "index.html", page.encode(errors="backslashreplace"))


# --- The lines that pytest prints at its end ------------------------------------------------------

# Gravest first.
STATUSES = tuple(reversed(Status))
MOST_SHOWN = 20
_IN_CI = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "TF_BUILD")


class ReportedOutcome(NamedTuple):
    """One outcome and the test that it is of."""

    test: str
    outcome: CheckOutcome


def print_summary(terminal: Any, reports: Sequence[Any], session: Session) -> None:
    """Print the summary, and write the list of pages.

    Args:
        terminal: pytest's reporter.
        reports: of every phase of every test, and of what was collected.
    """
    told = [
        ReportedOutcome(report.nodeid, outcome)
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
        pages = [*told, *(ReportedOutcome(OUTSIDE, outcome) for outcome in session.account.outside)]
        if any(one.outcome.page for one in pages):
            write_index(options.report, pages)
    if lines:
        terminal.section("paritas")
        for line in lines:
            terminal.line(line)


def summary_lines(
    told: Sequence[ReportedOutcome],
    passed: Sequence[str],
    account: RunAccount,
    options: PluginOptions,
) -> list[str]:
    """Nothing where nothing was asked.

    Args:
        told: of every test of the run.
        passed: tests that passed.
        account: what no single test can tell.
        options: of the run.
    """
    everything = [*told, *(ReportedOutcome(OUTSIDE, outcome) for outcome in account.outside)]
    lines = [*_verdicts(everything), *_guarded(everything, options), *_goldens(everything)]
    lines += [f"note: {note}" for note in account.notes]
    lines += _failures(everything)
    lines += _pages(everything, options)
    lines += _unused(everything, passed, account, options)
    return lines


def _verdicts(told: Sequence[ReportedOutcome]) -> Iterator[str]:
    judged = [one for one in told if one.outcome.enabled]
    off = len(told) - len(judged)
    if judged:
        counts = Counter(one.outcome.status for one in judged)
        each = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        tests = counted(len({one.test for one in judged}), "test")
        yield f"{counted(len(judged), 'verdict')} in {tests}: {each}"
    if off:
        yield f"{counted(off, 'check')} switched off: nothing was compared there"


def _guarded(told: Sequence[ReportedOutcome], options: PluginOptions) -> Iterator[str]:
    guards = [one.outcome for one in told if one.outcome.kind in {"guard", "suite guard"}]
    if guards:
        graphs, calls, checked = (
            sum(getattr(outcome, name) for outcome in guards)
            for name in ("graphs", "calls", "checked")
        )
        called = counted(calls, "call")
        yield f"guarded: {counted(graphs, 'graph')}, {checked} of {called} checked"
    elif options.guard:
        yield "guarded: nothing, because no test called anything that torch.compile made"


def _goldens(told: Sequence[ReportedOutcome]) -> Iterator[str]:
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


def _failures(told: Sequence[ReportedOutcome]) -> Iterator[str]:
    failed = [one for one in told if one.outcome.enabled and not one.outcome.passed]
    for test, outcome in failed[:MOST_SHOWN]:
        yield f"{outcome.status}: {test} ({outcome.what}) {outcome.worst}".rstrip()
    if len(failed) > MOST_SHOWN:
        yield f"and {len(failed) - MOST_SHOWN} more that do not pass"


def _pages(told: Sequence[ReportedOutcome], options: PluginOptions) -> Iterator[str]:
    pages = [one.outcome.page for one in told if one.outcome.page]
    if pages and options.report is not None:
        index = os.path.relpath(options.report / "index.html", Path.cwd())
        yield f"{counted(len(pages), 'page')} about what does not pass: {index}"


def _unused(
    told: Sequence[ReportedOutcome],
    passed: Sequence[str],
    account: RunAccount,
    options: PluginOptions,
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
