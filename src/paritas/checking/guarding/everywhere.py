"""guard_everywhere(): every `torch.compile` of a process guarded, whoever called it."""

from __future__ import annotations

import contextlib
import functools
import threading
import unittest
from typing import TYPE_CHECKING, Any

from paritas._torch.backends import find_backend
from paritas._torch.stance import keeping_backends, replacing_backends
from paritas.checking.guarding.backend import Guard
from paritas.checking.guarding.journal import Journal
from paritas.checking.guarding.settings import OFF, GuardSettings, is_enabled
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, TypeVar

    from paritas.numerics.findings import Verdict

    Backend = Callable[..., Any]
    T = TypeVar("T", bound=Callable[..., Any])

OWN_GUARD = (
    "a torch.compile of the program has a paritas.guard of its own, or a guard_everywhere around "
    "it, which was left as it is: what it found is in its own verdict"
)
RECORDED = "a torch.compile of the program has the backend paritas.record, which was not guarded"
SWITCHED_OFF = "a part of the program was left alone: guard_everywhere(enabled=False)"


def guard_everywhere(
    *,
    on_mismatch: str = "raise",
    every: float = 1,
    locate: bool = True,
    enabled: bool | None = None,
    check_passes: bool = False,
    strict: bool = False,
) -> GuardEverywhere:
    """Guard every `torch.compile` of this process, whoever calls it, in whatever thread.

    It is in force at once, until `off()` of what it gives; in a `with` statement, until that ends;
    as the decorator of a function or a `unittest.TestCase`, while that runs. Its `verdict()` is
    about all that was compared. Each `torch.compile` keeps the backend, mode
    and options that it was given. What was compiled before is compiled once more, guarded, when
    it is called next, and found again afterwards. Inside another, the inner one has its way.

    Args:
        on_mismatch: `raise` a `MismatchError`; `warn`; `record` for `verdict()`; or `fallback`,
            which gives the program the reference's result and goes on.
        every: check each n-th call of a graph; below 1, that share of its calls. The first call of
            a graph, and the first with new dynamic sizes, is always checked.
        locate: find the first wrong operator of what differs.
        enabled: False leaves everything unguarded, inside another `guard_everywhere` too; so does
            PARITAS_GUARD=0 in the environment.
        check_passes: check Inductor's graph passes, and its split into forward and backward, too.
        strict: count `unstable` as a failure.

    Raises:
        UsageError: an argument makes no sense.
        UnsupportedTorchError: this torch does not let every `torch.compile` be reached.
    """
    settings = GuardSettings(
        on_mismatch=on_mismatch,
        every=every,
        locate=locate,
        check_passes=check_passes,
        strict=strict,
    )
    return GuardEverywhere(settings, enabled=is_enabled(enabled)).on()


class GuardEverywhere:
    """Guards over a whole process: to be switched on and off, and asked for their verdict.

    Attributes:
        settings: what was asked for.
        enabled: off, nothing is guarded while it is on.
        journal: graphs, calls and findings so far.
    """

    def __init__(
        self, settings: GuardSettings, journal: Journal | None = None, *, enabled: bool = True
    ) -> None:
        """Nothing is guarded before `on()`."""
        self.settings = settings
        self.enabled = enabled
        self.journal = Journal(strict=settings.strict) if journal is None else journal
        self._guards = _Guards(settings, self.journal)
        self._stack: contextlib.ExitStack | None = None
        self._entered = 0
        if not enabled:
            self.journal.add((), [OFF])

    def on(self) -> Self:
        """Guard from now on; nothing changes where that is so already."""
        with _lock:
            if self._stack is None:
                stack = contextlib.ExitStack()
                stack.enter_context(self._over_the_process())
                self._stack = stack
        return self

    def off(self) -> None:
        """Guard no longer: what is called from now on has the backend that it was given."""
        with _lock:
            if self._stack is None:
                return
            self._stack.close()
            self._stack = None
        if self._guards.known and not self.journal.graphs:
            names = ", ".join(dict.fromkeys(guard.backend.name for _, guard in self._guards.known))
            self.journal.add((), [f"torch.compile was called ({names}), but captured no graph"])

    def _over_the_process(self) -> contextlib.AbstractContextManager[None]:
        if not self.enabled:
            return keeping_backends()
        return replacing_backends(
            self._guards.of, on_kept=lambda: self.journal.add((), [SWITCHED_OFF])
        )

    def verdict(self) -> Verdict:
        """Everything the guards have seen so far, in one verdict."""
        return self.journal.verdict()

    def __enter__(self) -> Self:
        """Guard what is called in here."""
        with _lock:
            self._entered += 1
            return self.on()

    def __exit__(self, *_: object) -> None:
        """Guard no longer, also after an exception; but for a function that calls itself."""
        with _lock:
            self._entered -= 1
            if not self._entered:
                self.off()

    def __call__(self, decorated: T) -> T:
        """Guard what a function calls, each time that it is called, and nothing else.

        Of a `unittest.TestCase`, what each of its tests calls.
        """
        self.off()
        if isinstance(decorated, type) and issubclass(decorated, unittest.TestCase):
            prepare = decorated.setUp

            @functools.wraps(prepare)
            def set_up(test: unittest.TestCase) -> None:
                test.enterContext(self)
                prepare(test)

            decorated.setUp = set_up  # type: ignore[assignment, method-assign]
            return decorated
        if isinstance(decorated, type) or not callable(decorated):
            raise UsageError(
                f"guard_everywhere() decorates a function or a unittest.TestCase, not "
                f"{decorated!r:.80}; use it in a with statement"
            )

        @functools.wraps(decorated)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return decorated(*args, **kwargs)

        return guarded  # type: ignore[return-value]


_lock = threading.RLock()


class _Guards:
    """One guard for each backend: Dynamo finds compiled code again by comparing backends."""

    def __init__(self, settings: GuardSettings, journal: Journal) -> None:
        self.settings = settings
        self.journal = journal
        self.known: list[tuple[Backend, Guard]] = []

    def of(self, backend: Backend) -> Guard | None:
        """The guard to use in place of a backend; None for paritas' own backends."""
        inner = getattr(backend, "compiler_fn", backend)  # what torch.compile wraps
        package, _, home = type(inner).__module__.partition(".")
        if package == "paritas":
            if isinstance(inner, Guard) and inner.journal is not self.journal:
                self.journal.add((), [OWN_GUARD])
            elif home.startswith("recording"):
                self.journal.add((), [RECORDED])
            return None
        # By comparison, as Dynamo does it: such wrappers have no hash.
        for known, guard in self.known:
            if known is backend or known == backend:
                return guard
        guard = Guard(find_backend(backend), self.settings, journal=self.journal)
        self.known.append((backend, guard))
        return guard
