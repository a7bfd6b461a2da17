"""What guarded code of every kind does with a call: is it due, how did it end, what follows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from paritas.checking.comparing import Collected
from paritas.checking.guarding.comparing import CallComparer, Experience
from paritas.checking.guarding.settings import GuardSettings, Schedule
from paritas.checking.observing import memory
from paritas.checking.remembering import FailedGraph, MadeBy, remember
from paritas.errors import MismatchError, ParityWarning
from paritas.numerics.findings import Aspect, Finding, Origin, OriginKind, Status, Verdict
from paritas.recording.isolation import Copier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from paritas.checking.guarding.journal import GraphEntry, Journal
    from paritas.checking.noise import NoiseRuns


class GuardedCode:
    """Compiled code with a schedule of checks and a journal to write them to."""

    def __init__(self, settings: GuardSettings, journal: Journal, entry: GraphEntry) -> None:
        """`entry` is the graph's own page of the journal."""
        self.settings = settings
        self.journal = journal
        self.entry = entry
        self.schedule = Schedule(settings.every, settings.seed)
        self.experience = Experience()
        self.made_by: MadeBy | None = None

    def is_due(self, args: Any) -> bool:
        """Count a call and say whether to check it."""
        self.entry.calls += 1
        return self.schedule.due(tuple(value for value in args if isinstance(value, int)))

    def comparer(self, runs: NoiseRuns) -> CallComparer:
        """Something to compare one call with."""
        return CallComparer(runs, self.entry.label, self.experience)

    def rolled_up(self, out: Collected, runs: NoiseRuns) -> Verdict:
        """The verdict about one call."""
        out.notes += [f"{self.entry.label}: {note}" for note in runs.notes]
        return out.verdict(strict=self.settings.strict)

    def own_failure(self, error: Exception) -> Verdict:
        """A verdict that says that the check itself failed; the program goes on."""
        out = Collected()
        reason = f"the check itself failed: {_told(error)}"
        out.add(f"{self.entry.label}: call", Aspect.HARNESS, Status.UNVERIFIED, reason)
        return out.verdict(strict=self.settings.strict)

    def judge_errors(
        self, out: Collected, reference: Exception | None, candidate: Exception | None
    ) -> bool:
        """Report what either side raised; whether there was anything to report."""
        path = f"{self.entry.label}: call"
        if reference is None and candidate is None:
            return False
        if candidate is None:
            reason = f"the graph itself, run op by op, raises {_told(reference)}"
            out.add(path, Aspect.HARNESS, Status.UNVERIFIED, reason)
        elif reference is None:
            out.compared += 1
            reason = f"the compiled code raises {_told(candidate)}; the graph does not"
            out.add(path, Aspect.EXCEPTION, Status.DIFFERENT, reason)
        else:
            reason = f"both raise: the compiled code {_told(candidate)}"
            out.add(path, Aspect.EXCEPTION, Status.UNVERIFIED, reason)
        return True

    def conclude(
        self,
        verdict: Verdict,
        results: Any,
        error: Exception | None,
        substitute: Callable[[], Any],
        called: tuple[GraphModule, Sequence[Any]] | None = None,
    ) -> Any:
        """Write the call down, and give the program what the settings say it gets.

        Args:
            called: the graph and its arguments as they were, to be kept of a call that fails.
        """
        self.journal.note_call(self.entry, verdict)
        differs = [f for f in verdict.failures if f.status is not Status.UNVERIFIED]
        if differs and called is not None:
            remember(verdict, self.journal.keep(self.entry.label, lambda: self._failed(*called)))
        action = self.settings.on_mismatch
        if differs and action == "raise":
            raise MismatchError(str(verdict), verdict) from error
        # What could not be checked does not stop the program, but is never passed over.
        if verdict.failures and action != "record":
            warnings.warn(str(verdict), ParityWarning, stacklevel=3)
        if differs and action == "fallback":
            return substitute()
        if error is not None:
            raise error
        return results

    def _failed(self, module: GraphModule, kept: Sequence[Any]) -> FailedGraph | None:
        """A call with copies of its arguments: the program goes on and changes them."""
        if self.made_by is None:
            return None
        copier = Copier()
        try:
            inputs = [copier.copy_tree(value) for value in kept]
        except Exception as error:  # noqa: BLE001  (no memory left, say: only shrinking needs it)
            note = f"{self.entry.label}: its arguments could not be kept: {_told(error)}"
            self.journal.add((), [note])
            return None
        gradients = self.entry.label.endswith("gradients")
        return FailedGraph(self.entry.label, module, inputs, self.made_by, gradients)


def located(locator: Callable[[Any], list[Finding]], suspect: Any) -> list[Finding]:
    """Where it starts; if looking for that fails, the program shall not, and is told so."""
    try:
        return locator(suspect)
    except Exception as error:  # noqa: BLE001
        return [
            Finding(
                path=f"{suspect.label}: where it starts",
                aspect=Aspect.HARNESS,
                status=Status.UNVERIFIED,
                reason=f"looking for it failed: {_told(error)}",
                origin=Origin(kind=OriginKind.GRAPH, name=suspect.label),
            )
        ]


def same_place(value: Any, original: Any) -> bool:
    """Whether two tensors are the same values in the same memory."""
    if not isinstance(value, torch.Tensor) or not isinstance(original, torch.Tensor):
        return False
    return (
        memory(value) == memory(original) != 0
        and value.dtype is original.dtype
        and value.shape == original.shape
        and value.stride() == original.stride()
        and value.storage_offset() == original.storage_offset()
    )


def _told(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.120}" if text else repr(error)
