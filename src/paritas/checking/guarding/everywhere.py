"""Guard every `torch.compile` of a process, whoever called it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from paritas._torch.backends import find_backend
from paritas._torch.stance import replacing_backends
from paritas.checking.guarding.backend import Guard
from paritas.checking.guarding.journal import Journal
from paritas.checking.guarding.settings import SWITCH, GuardSettings, is_enabled
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Backend = Callable[..., Any]

OWN_GUARD = (
    "a torch.compile of the program has a paritas.guard of its own, which was left as it is: what "
    "it found is in its own verdict"
)


@contextlib.contextmanager
def guard_everywhere(settings: GuardSettings, journal: Journal | None = None) -> Iterator[Journal]:
    """Guard what is compiled in here, each with the backend, mode and options it was given.

    Gives the one journal of all, a new one unless it is given; read its verdict afterwards.

    Raises:
        UsageError: guards are switched off in the environment.
        UnsupportedTorchError: this torch does not let every `torch.compile` be reached.
    """
    if not is_enabled(None):
        raise UsageError(f"{SWITCH} in the environment switches every guard off; unset it")
    kept = Journal(strict=settings.strict) if journal is None else journal
    guards = _Guards(settings, kept)
    with replacing_backends(guards.of):
        yield kept
    if guards.known and not kept.graphs:
        names = ", ".join(dict.fromkeys(guard.backend.name for _, guard in guards.known))
        kept.add((), [f"torch.compile was called ({names}), but captured no graph"])


class _Guards:
    """One guard for each backend: Dynamo finds compiled code again by comparing backends."""

    def __init__(self, settings: GuardSettings, journal: Journal) -> None:
        self.settings = settings
        self.journal = journal
        self.known: list[tuple[Backend, Guard]] = []

    def of(self, backend: Backend) -> Guard | None:
        """The guard to use in place of a backend; None for paritas' own backends."""
        inner = getattr(backend, "compiler_fn", backend)  # what torch.compile wraps
        if type(inner).__module__.partition(".")[0] == "paritas":
            if isinstance(inner, Guard) and inner.journal is not self.journal:
                self.journal.add((), [OWN_GUARD])
            return None
        # By comparison, as Dynamo does it: such wrappers have no hash.
        for known, guard in self.known:
            if known is backend or known == backend:
                return guard
        guard = Guard(find_backend(backend), self.settings, journal=self.journal)
        self.known.append((backend, guard))
        return guard
