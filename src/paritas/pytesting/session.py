"""One run of pytest: its options, the guard over all of it, and what no single test can tell."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.errors import UsageError
from paritas.pytesting.golden_places import test_folder
from paritas.pytesting.outcomes import OUTSIDE, Outcome

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    import pytest

    from paritas.numerics.findings import Verdict
    from paritas.pytesting.options import Options
    from paritas.pytesting.parity import Parity
    from paritas.pytesting.suite_guard import SuiteGuard

__all__ = ["Account", "Session"]

NOTE = "paritas has found in what this test compiled:"


class Account(msgspec.Struct, kw_only=True):
    """What a process tells at its end, besides the reports of its tests; a worker sends it.

    Attributes:
        outside: verdicts about what ran while no test did, at collection say.
        notes: about the run as a whole.
        files: per test file whose every test was collected, the folder of its goldens and those
            of its tests.
    """

    outside: list[Outcome] = []
    notes: list[str] = []
    files: dict[str, list[str]] = {}

    def merge(self, other: Account) -> None:
        """Add what another process tells."""
        self.outside += other.outside
        self.notes += [note for note in other.notes if note not in self.notes]
        self.files |= other.files

    def encode(self) -> str:
        """As text, which any channel between processes takes."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Account:
        """What `encode` wrote."""
        return msgspec.json.decode(text, type=cls)


class Session:
    """The state of one run, in the stash of its configuration."""

    def __init__(self, options: Options) -> None:
        """Start the guard over the suite, where it was asked for.

        Raises:
            UsageError: a setting is wrong.
        """
        self.options = options
        self.account = Account()
        self.suite: SuiteGuard | None = None
        # Of the test that runs.
        self._parity: Parity | None = None
        self._marks: dict[str, Any] = {}
        if options.guard:
            from paritas.pytesting.suite_guard import SuiteGuard

            self.suite = SuiteGuard(options)
            self.suite.start()

    def _note_collected(self, tests: Iterable[str]) -> None:
        """Remember which tests there are, of files that have goldens."""
        for test in tests:
            folder = test_folder(self.options.root, self.options.golden_dir, test)
            if folder.parent.is_dir():
                self.account.files.setdefault(str(folder.parent), []).append(str(folder))

    def parity_of(self, item: pytest.Item) -> Parity:
        """What the fixture gives to a test."""
        from paritas.pytesting.parity import Parity

        self._parity = Parity(item, self.options)
        return self._parity

    @property
    def has_failed_outside_tests(self) -> bool:
        """Whether something is wrong that no test can be blamed for."""
        return any(not outcome.passed for outcome in self.account.outside)

    def finish(self, tests: Iterable[str]) -> None:
        """End the guard, and take what is left on its page.

        Args:
            tests: all that were collected, or none where that were not all.
        """
        self._note_collected(tests)
        if self.suite is None:
            return
        self.take_outside()
        self.account.notes += self.suite.stop()
        if self.suite.failure is not None:
            worst = str(self.suite.failure)
            lost = Outcome(kind="suite guard", status="unverified", passed=False, worst=worst)
            self.account.outside.append(lost)
        self.suite = None

    def take_outside(self, *, strict: bool | None = None) -> None:
        """What was checked since the last test ended belongs to none."""
        seen = None if self.suite is None else self.suite.turn(strict=strict)
        if seen is not None:
            from paritas.pytesting.recorder import short_outcome

            number = len(self.account.outside)
            counts = seen.counts()
            outcome = short_outcome(
                "suite guard", seen.verdict, self.options, OUTSIDE, number, **counts
            )
            self.account.outside.append(outcome)

    def watch(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        """Let one phase of a test run, and fail it if a graph that ran in it is wrong."""
        __tracebackhide__ = True
        if phase == "setup":
            self._marks = {}
            self._marks = _marked(item)
        settings = self._marks
        strict = settings.get("strict")
        if phase == "setup":
            self.take_outside(strict=strict)
        raised: BaseException | None = None
        result = None
        with self._switched(on=settings.get("enabled") is not False):
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
        """End a phase: with what the test itself raised, or else with what the guards found."""
        __tracebackhide__ = True
        failed: list[Verdict] = []
        if self._parity is not None and phase != "setup":
            failed += self._parity.conclude(interrupted=raised is not None)
        seen = None if self.suite is None else self.suite.turn(strict=strict)
        if seen is not None:
            from paritas.pytesting.recorder import Recorder

            Recorder(item, self.options).record("suite guard", seen.verdict, **seen.counts())
            failed += [] if seen.verdict.passed else [seen.verdict]
        if phase == "teardown":
            self._parity = None
        if failed:
            _fail(failed, raised)
        if raised is not None:
            raise raised

    @contextlib.contextmanager
    def _switched(self, *, on: bool) -> Iterator[None]:
        if on or self.suite is None:
            yield
            return
        with self.suite.off():
            yield


def _fail(failed: list[Verdict], raised: BaseException | None) -> None:
    """Fail the test, unless it has failed by itself: then tell it beside that."""
    import pytest

    from paritas.errors import MismatchError

    told = "\n".join(map(str, failed))
    if raised is None or isinstance(raised, pytest.skip.Exception):
        pytest.fail(told, pytrace=False)  # no line of the test's is to blame
    if not isinstance(raised, MismatchError):
        raised.add_note(f"{NOTE}\n{told}")


def _marked(item: pytest.Item) -> dict[str, Any]:
    """The settings of a test; torch stays away where it has none."""
    if item.get_closest_marker("parity") is None:
        return {}
    import pytest

    from paritas.pytesting.marks import settings_of

    try:
        return settings_of(item)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
