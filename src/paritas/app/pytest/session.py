"""One pytest run: the guard for the whole suite, the outcomes of its checks, the final summary."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from paritas.app.pytest import PROPERTY
from paritas.core.compiled.guard_settings import SWITCH, GuardSettings, GuardWatch, is_enabled
from paritas.core.errors import UsageError
from paritas.core.reporting.files import write_whole
from paritas.core.results.causes import group_causes
from paritas.core.results.wording import count_things, near_path, status_counts

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator, Sequence

    import pytest

    from paritas.app.pytest import PluginOptions
    from paritas.app.pytest.parity import Parity, SuiteJournal
    from paritas.core.results.findings import Finding, Verdict


# --- Folders of goldens ---------------------------------------------------------------------------

GOLDEN = "golden"
# A golden is a dump, which contains this folder.
_RANK = "rank0"
_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]=-]+")
LONGEST_NAME = 80


def test_folder(root: Path, golden_dir: Path | None, test: str) -> Path:
    """The folder of a test's goldens.

    Args:
        root: node ids are relative to it.
        golden_dir: the folder of all goldens; None for a folder beside the test.
        test: its node id, `tests/test_model.py::TestFusion::test_norm[bfloat16]`.
    """
    file, _, name = test.partition("::")
    path = Path(file)
    inside = safe_name(name.replace("::", "."))
    if golden_dir is None:
        return root / path.parent / GOLDEN / path.stem / inside
    parts = path.with_suffix("").parts
    return golden_dir / safe_name("/".join(parts)) / inside


def golden_folder(tests: Path, name: str) -> Path:
    """The folder of one golden.

    Raises:
        UsageError: the name is empty.
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"the name of a golden must be a non-empty string, got {name!r}")
    return tests / safe_name(name)


def safe_name(text: str) -> str:
    """A folder name that is valid on any system; a hash keeps changed names distinct."""
    plain = _PLAIN.sub("_", text).strip(".")[:LONGEST_NAME]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def unused_goldens(
    passed: Iterable[Path],
    collected_files: Iterable[tuple[Path, Collection[Path]]],
    used: Collection[Path],
) -> list[Path]:
    """Goldens that this run shows to be unused.

    Args:
        passed: the folders of tests that passed: they need no goldens that they did not use.
        collected_files: for each fully collected test file, the folder of its goldens and the
            folders of its tests: any other folder belongs to a test that no longer exists.
        used: the goldens that were used.
    """
    unused = [path for folder in passed for path in _goldens_below(folder) if path not in used]
    for folder, tests in collected_files:
        gone = [path for path in _folders(folder) if path not in tests]
        unused += [path for test in gone for path in _goldens_below(test)]
    return sorted(set(unused))


def _goldens_below(test: Path) -> list[Path]:
    return [path for path in _folders(test) if (path / _RANK).is_dir()]


def _folders(path: Path) -> list[Path]:
    return [below for below in path.iterdir() if below.is_dir()] if path.is_dir() else []


# --- One outcome, short enough for the test's report ----------------------------------------------

# pytest copies `user_properties` to JUnit XML, and xdist sends them to its controller, which needs
# no torch to print the summary.

# For a table or a build server: the whole verdict is in the test's failure message.
LONGEST_LINE = 300
# Instead of a test, for code that ran outside of tests.
OUTSIDE = "outside of tests"

CheckKind = Literal["verify", "guard", "golden", "invariants", "suite guard"]


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One verdict in short.

    Attributes:
        kind: `parity.verify`, `parity.guard`, `parity.golden`, `parity.invariants` or
            `--paritas-guard`.
        enabled: if not, the check was disabled and nothing was compared.
        name: of the golden, or of the guarded backend.
        worst: the gravest finding in one line, or "".
        graphs: the number of compiled graphs that were checked.
        calls: the number of their calls.
        checked: the number of calls that were checked.
        written: `written` or `changed` if the golden was updated.
        golden: the folder of the golden, relative to the root of the run.
        page: its HTML page, relative to the root of the run, or "".
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
        """The name of the check."""
        return f"{self.kind} {self.name}".strip()

    def encode(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()


def outcome_of(kind: CheckKind, verdict: Verdict) -> CheckOutcome:
    """A verdict in short."""
    causes = group_causes(verdict.failures)
    return CheckOutcome(
        kind=kind,
        status=verdict.status.value,
        passed=verdict.passed,
        compared=verdict.coverage.compared,
        enabled=verdict.enabled,
        worst=_worst_line(causes[0].start) if causes else "",
    )


def outcomes_in(properties: Iterable[tuple[str, object]]) -> Iterator[CheckOutcome]:
    """The outcomes among the properties of a report."""
    for name, value in properties:
        if name == PROPERTY and isinstance(value, str):
            yield msgspec.json.decode(value, type=CheckOutcome)


def _worst_line(finding: Finding) -> str:
    at = "" if finding.source is None else f" at {near_path(finding.source)}"
    reason = f": {finding.reason}" if finding.reason else ""
    words = " ".join(f"{finding.path}{at}{reason}".split())
    return words if len(words) <= LONGEST_LINE else f"{words[: LONGEST_LINE - 1]}…"


# --- Recording outcomes ---------------------------------------------------------------------------


def record_outcome(
    item: pytest.Item, options: PluginOptions, kind: CheckKind, verdict: Verdict, **facts: Any
) -> None:
    """Attach a verdict to a test's report; `facts` are further fields of the outcome."""
    number = sum(name == PROPERTY for name, _ in item.user_properties)
    outcome = short_outcome(kind, verdict, options, item.nodeid, number, **facts)
    item.user_properties.append((PROPERTY, outcome.encode()))


def short_outcome(
    kind: CheckKind, verdict: Verdict, options: PluginOptions, title: str, number: int, **facts: Any
) -> CheckOutcome:
    """A verdict in short; it also writes a page if the verdict fails and pages are wanted.

    Args:
        title: of the page, the node id of the test.
        number: of the verdict in the test, from 0.
        facts: further fields of the outcome.
    """
    outcome = msgspec.structs.replace(outcome_of(kind, verdict), **facts)
    if options.report is None or outcome.passed or not outcome.enabled:
        return outcome
    page = write_page(options.report, verdict, outcome, title, number)
    return msgspec.structs.replace(outcome, page=os.path.relpath(page, options.root))


# --- A page and a JSON file for each failed verdict, and an index of all --------------------------


def write_page(
    folder: Path, verdict: Verdict, outcome: CheckOutcome, test: str, number: int
) -> Path:
    """Write the page of one verdict, and beside it the JSON with every finding."""
    from paritas.core.reporting.pages import verdict_page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--paritas-report {str(folder)!r}: {error.strerror or error}; give a folder"
        raise UsageError(message) from error
    path = folder / f"{safe_name(test.replace('/', '.').replace('::', '.'))}-{number}.html"
    data = path.with_suffix(".json")
    write_whole(data, verdict.to_json())
    page = verdict_page(verdict, test, outcome.what, data.name)
    write_whole(path, page.encode(errors="backslashreplace"))
    return path


def write_index(folder: Path, outcomes: Sequence[ReportedOutcome]) -> None:
    """Write the index of the pages of a run."""
    from paritas.core.reporting.pages import PageLink, index_page

    links = [
        PageLink(
            test=outcome.test,
            what=outcome.outcome.what,
            status=outcome.outcome.status,
            worst=outcome.outcome.worst,
            href=outcome.outcome.page.replace("\\", "/").rpartition("/")[2],
        )
        for outcome in outcomes
        if outcome.outcome.page
    ]
    page = index_page(links, verdicts=len(outcomes))
    write_whole(folder / "index.html", page.encode(errors="backslashreplace"))


# --- The summary that pytest prints at its end ----------------------------------------------------

MOST_SHOWN = 20
_IN_CI = ("CI", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "TF_BUILD")


class ReportedOutcome(NamedTuple):
    """An outcome and its test."""

    test: str
    outcome: CheckOutcome


def print_summary(terminal: Any, reports: Sequence[Any], session: Session) -> None:
    """Print the summary, and write the index of pages.

    Args:
        terminal: pytest's reporter.
        reports: of every phase of every test, and of collection.
    """
    outcomes = [
        ReportedOutcome(report.nodeid, outcome)
        for report in reports
        if getattr(report, "when", "") == "teardown"  # it has the outcomes of all phases
        for outcome in outcomes_in(report.user_properties)
    ]
    passed = [
        report.nodeid
        for report in reports
        if getattr(report, "when", "") == "call" and report.outcome == "passed"
    ]
    account, options = session.account, session.options
    outcomes += [ReportedOutcome(OUTSIDE, outcome) for outcome in account.outside]
    if options.report is not None and any(outcome.outcome.page for outcome in outcomes):
        write_index(options.report, outcomes)
    lines = summary_lines(outcomes, passed, account, options)
    if lines:
        terminal.section("paritas")
        for line in lines:
            terminal.line(line)


def summary_lines(
    outcomes: Sequence[ReportedOutcome],
    passed: Sequence[str],
    account: RunAccount,
    options: PluginOptions,
) -> list[str]:
    """The lines of the summary; empty if no test checked parity.

    Args:
        outcomes: of every test of the run, and of code outside of tests.
        passed: the tests that passed.
        account: what belongs to no single test.
        options: of the run.
    """
    lines = [*_verdicts(outcomes), *_describe_guards(outcomes, options), *_goldens(outcomes)]
    lines += [f"note: {note}" for note in account.notes]
    lines += _failures(outcomes)
    lines += _pages(outcomes, options)
    lines += _list_unused_goldens(outcomes, passed, account, options)
    return lines


def _verdicts(outcomes: Sequence[ReportedOutcome]) -> Iterator[str]:
    judged = [outcome for outcome in outcomes if outcome.outcome.enabled]
    off = len(outcomes) - len(judged)
    if judged:
        each = ", ".join(status_counts(entry.outcome.status for entry in judged))
        tests = count_things(len({entry.test for entry in judged}), "test")
        yield f"{count_things(len(judged), 'verdict')} in {tests}: {each}"
    if off:
        yield f"{count_things(off, 'check')} disabled: nothing was compared there"


def _describe_guards(outcomes: Sequence[ReportedOutcome], options: PluginOptions) -> Iterator[str]:
    guards = [
        outcome.outcome for outcome in outcomes if outcome.outcome.kind in {"guard", "suite guard"}
    ]
    if guards:
        graphs, calls, checked = (
            sum(getattr(outcome, name) for outcome in guards)
            for name in ("graphs", "calls", "checked")
        )
        called = count_things(calls, "call")
        yield f"guarded: {count_things(graphs, 'graph')}, {checked} of {called} checked"
    elif options.guard:
        yield "guarded: nothing, because no test called a compiled function"


def _goldens(outcomes: Sequence[ReportedOutcome]) -> Iterator[str]:
    goldens = [outcome for outcome in outcomes if outcome.outcome.kind == "golden"]
    new = [golden for golden in goldens if golden.outcome.written]
    if not new:
        return
    counts = Counter(waiting_entry.outcome.written for waiting_entry in new)
    each = ", ".join(f"{counts[word]} {word}" for word in ("written", "changed") if counts[word])
    yield f"goldens: {each}, {len(goldens) - len(new)} unchanged"
    for entry in new[:MOST_SHOWN]:
        was = f" (it was off: {entry.outcome.worst})" if entry.outcome.worst else ""
        yield f"  {entry.outcome.written}: {entry.outcome.golden}{was}"
    if len(new) > MOST_SHOWN:
        yield f"  and {len(new) - MOST_SHOWN} more"
    if any(os.environ.get(name) for name in _IN_CI):
        yield "  this looks like a build server: new goldens are lost unless they are committed"


def _failures(outcomes: Sequence[ReportedOutcome]) -> Iterator[str]:
    failed = [entry for entry in outcomes if entry.outcome.enabled and not entry.outcome.passed]
    for test, outcome in failed[:MOST_SHOWN]:
        yield f"{outcome.status}: {test} ({outcome.what}) {outcome.worst}".rstrip()
    if len(failed) > MOST_SHOWN:
        yield f"and {len(failed) - MOST_SHOWN} more failures"


def _pages(outcomes: Sequence[ReportedOutcome], options: PluginOptions) -> Iterator[str]:
    pages = [outcome.outcome.page for outcome in outcomes if outcome.outcome.page]
    if pages and options.report is not None:
        index = os.path.relpath(options.report / "index.html", Path.cwd())
        yield f"{count_things(len(pages), 'page')} about failures: {index}"


def _list_unused_goldens(
    outcomes: Sequence[ReportedOutcome],
    passed: Sequence[str],
    account: RunAccount,
    options: PluginOptions,
) -> Iterator[str]:
    used = {options.root / outcome.outcome.golden for outcome in outcomes if outcome.outcome.golden}
    used = {Path(os.path.normpath(path)) for path in used}
    folders = [test_folder(options.root, options.golden_dir, test) for test in passed]
    complete = [
        (Path(file), {Path(test) for test in tests}) for file, tests in account.files.items()
    ]
    unused = unused_goldens(folders, complete, used)
    for path in unused[:MOST_SHOWN]:
        near = os.path.relpath(path, options.root)
        yield f"unused golden: {near}; no test uses it, so delete it or find out why"
    if len(unused) > MOST_SHOWN:
        yield f"and {len(unused) - MOST_SHOWN} more unused goldens"


# --- `--paritas-guard` ----------------------------------------------------------------------------

# Compiled code outlives the test that compiled it, but a finding belongs to the test that called
# the code. So the journal of the guards starts a new page for each phase of each test.


class CheckedCalls(NamedTuple):
    """The calls on one page of the journal."""

    verdict: Verdict
    graphs: int
    calls: int
    checked: int

    def counts(self) -> dict[str, Any]:
        """The fields of an outcome."""
        return {"graphs": self.graphs, "calls": self.calls, "checked": self.checked}


class SuiteGuard:
    """Guards all compiled calls of the process; imports torch only at the first one."""

    def __init__(self, options: PluginOptions) -> None:
        """Check the settings.

        Raises:
            UsageError: a setting is wrong, or the environment disables guards.
        """
        if not is_enabled(None):
            value = os.environ[SWITCH]
            raise UsageError(
                f"--paritas-guard has no effect: {SWITCH}={value} in the environment disables "
                "guards; unset it"
            )
        self.settings = GuardSettings(
            on_mismatch="record", every=options.every, strict=options.strict
        )
        self._watch = GuardWatch(self.settings, self._make_journal)
        self._journal: SuiteJournal | None = None

    @property
    def failure(self) -> Exception | None:
        """Why nothing could be guarded; the test where it occurred may have ignored it."""
        return self._watch.failure

    def start(self) -> None:
        """Wait for the first compiled call."""
        self._watch.start()

    def stop(self) -> tuple[str, ...]:
        """Restore torch, and return notes on the run as a whole."""
        self._watch.stop()
        if self.failure is not None:
            return (f"nothing was guarded after an error: {self.failure}",)
        if self._journal is None:
            return ()
        notes = self._journal.verdict().notes
        if count := self._journal.raised:
            calls = count_things(count, "call")
            notes += (f"{calls} raised in the compiled code and in its graph: nothing to compare",)
        return notes

    def turn(self, *, strict: bool | None = None) -> CheckedCalls | None:
        """Start a new page; return the calls on the old one, None if there are none.

        Args:
            strict: whether `unstable` fails on the new page; None: as in the settings.
        """
        if self._journal is None:
            return None
        return self._journal.turn(strict=self.settings.strict if strict is None else strict)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Do not guard what is compiled in this block."""
        from paritas.core.torch_private.dynamo import unguarded

        with unguarded():
            yield

    def _make_journal(self) -> SuiteJournal:
        from paritas.app.pytest.parity import SuiteJournal

        self._journal = SuiteJournal(strict=self.settings.strict)
        return self._journal


# --- The run --------------------------------------------------------------------------------------

NOTE = "paritas found this in the compiled code of the test:"


class RunAccount(msgspec.Struct, kw_only=True):
    """What a process reports at its end besides its tests; a worker of xdist sends it.

    Attributes:
        outside: verdicts on code that ran outside of tests, for example at collection.
        notes: on the run as a whole.
        files: for each fully collected test file, the folder of its goldens and the folders of its
            tests.
    """

    outside: list[CheckOutcome] = []
    notes: list[str] = []
    files: dict[str, list[str]] = {}

    def merge(self, other: RunAccount) -> None:
        """Add the account of another process."""
        self.outside += other.outside
        self.notes += [note for note in other.notes if note not in self.notes]
        self.files |= other.files

    def encode(self) -> str:
        """Encode as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> RunAccount:
        """Decode the text of `encode`."""
        return msgspec.json.decode(text, type=cls)


class Session:
    """The state of one run, in the stash of its configuration."""

    def __init__(self, options: PluginOptions) -> None:
        """Start the guard for the suite if it is enabled.

        Raises:
            UsageError: a setting is wrong.
        """
        self.options = options
        self.account = RunAccount()
        self.suite: SuiteGuard | None = None
        # Of the running test.
        self._parity: Parity | None = None
        self._marks: dict[str, Any] = {}
        if options.guard:
            self.suite = SuiteGuard(options)
            self.suite.start()

    def parity_of(self, item: pytest.Item) -> Parity:
        """The value of the fixture for a test."""
        from paritas.app.pytest.parity import Parity

        self._parity = Parity(item, self.options)
        return self._parity

    @property
    def has_failed_outside_tests(self) -> bool:
        """Whether something failed outside of tests."""
        return any(not outcome.passed for outcome in self.account.outside)

    def finish(self, tests: Iterable[str]) -> None:
        """Stop the guard, and take the rest of its journal.

        Args:
            tests: all collected tests; empty if only a part was collected.
        """
        for test in tests:
            folder = test_folder(self.options.root, self.options.golden_dir, test)
            if folder.parent.is_dir():
                self.account.files.setdefault(str(folder.parent), []).append(str(folder))
        if self.suite is None:
            return
        self.take_outside()
        self.account.notes += self.suite.stop()
        if self.suite.failure is not None:
            worst = str(self.suite.failure)
            lost = CheckOutcome(kind="suite guard", status="unverified", passed=False, worst=worst)
            self.account.outside.append(lost)
        self.suite = None

    def take_outside(self, *, strict: bool | None = None) -> None:
        """Record calls since the end of the last test, which belong to no test."""
        visited = None if self.suite is None else self.suite.turn(strict=strict)
        if visited is not None:
            number = len(self.account.outside)
            outcome = short_outcome(
                "suite guard", visited.verdict, self.options, OUTSIDE, number, **visited.counts()
            )
            self.account.outside.append(outcome)

    def watch(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        """Run one phase of a test, and fail it if a graph that ran in it is wrong."""
        __tracebackhide__ = True
        if phase == "setup":
            self._marks = {}
            self._marks = _read_marks(item)
        settings = self._marks
        strict = settings.get("strict")
        if phase == "setup":
            self.take_outside(strict=strict)
        raised: BaseException | None = None
        result = None
        with self._switch_suite(on=settings.get("enabled") is not False):
            try:
                result = yield
            except BaseException as error:  # noqa: BLE001  (raised again by `conclude`)
                raised = error
        self.conclude(item, phase, raised, strict=strict)
        return result

    def conclude(
        self,
        item: pytest.Item,
        phase: str,
        raised: BaseException | None = None,
        *,
        strict: bool | None = None,
    ) -> None:
        """End a phase with the exception of the test, or else with the failures of the guards."""
        __tracebackhide__ = True
        failed: list[Verdict] = []
        if self._parity is not None and phase != "setup":
            failed += self._parity.conclude(interrupted=raised is not None)
        visited = None if self.suite is None else self.suite.turn(strict=strict)
        if visited is not None:
            record_outcome(item, self.options, "suite guard", visited.verdict, **visited.counts())
            failed += [] if visited.verdict.passed else [visited.verdict]
        if phase == "teardown":
            self._parity = None
        if failed:
            _fail_test(failed, raised)
        if raised is not None:
            raise raised

    @contextlib.contextmanager
    def _switch_suite(self, *, on: bool) -> Iterator[None]:
        if on or self.suite is None:
            yield
            return
        with self.suite.off():
            yield


def _fail_test(failed: list[Verdict], raised: BaseException | None) -> None:
    """Fail the test, or add a note to its own exception."""
    import pytest

    from paritas.core.errors import MismatchError

    text = "\n".join(map(str, failed))
    if raised is None or isinstance(raised, pytest.skip.Exception):
        pytest.fail(text, pytrace=False)  # no single line of the test is responsible
    if not isinstance(raised, MismatchError):
        raised.add_note(f"{NOTE}\n{text}")


def _read_marks(item: pytest.Item) -> dict[str, Any]:
    """The settings of a test; torch is imported only if it has a mark."""
    if item.get_closest_marker("parity") is None:
        return {}
    import pytest

    from paritas.app.pytest.parity import settings_of

    try:
        return settings_of(item)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
