"""One call of guarded code: whether to check it, how it differs, what the journal keeps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.compiled.guard_settings import GuardSettings, Schedule, require_time
from paritas.core.errors import MismatchError, ParityWarning, in_one_line
from paritas.core.execution.differences import PairDifference, all_equal, differences
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import Observation, storage_address
from paritas.core.execution.saved_state import Copier
from paritas.core.judging.comparer import CollectedFindings
from paritas.core.judging.failures import (
    Explainer,
    FailedGraph,
    GraphCode,
    GraphMaker,
    gradient_call,
    gradient_runs,
    likely_mixups,
    remember_failed,
    without_kind,
)
from paritas.core.judging.matching import match
from paritas.core.judging.pairs import Checks, Pair, Ruling, judge_pair
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.flattening import flatten_value, is_dense
from paritas.core.numerics.gates import LearntNoise, error_ratios, relative_difference
from paritas.core.numerics.metrics import pair_metrics, quickly_equal
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Status,
    Verdict,
    mismatch,
    starting_place,
    unverified,
)
from paritas.core.results.items import CALL, Item, ItemKind, after_call, harness, in_order
from paritas.core.results.wording import count_things, headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeVar

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.core.diagnosis.case import Context
    from paritas.core.execution.evidence import Evidence
    from paritas.core.execution.program import Program
    from paritas.core.execution.saved_state import RandomState
    from paritas.core.execution.threads import ThreadTimes
    from paritas.core.numerics.gates import Sizes


# --- The journal of a guard -----------------------------------------------------------------------

NO_GRAPH = "torch.compile compiled nothing: it captured no operator (see TORCH_LOGS=graph_breaks)"
# The number of graphs for which a failing call is kept, with copies of its arguments.
MOST_KEPT = 4


@dataclasses.dataclass
class GraphEntry:
    """One compiled graph.

    Attributes:
        label: its name in findings.
        source: its place in the user's program.
        calls: number of calls.
        checked: number of checked calls.
        failed: number of checked calls that differed.
        compared: number of compared items, over all calls.
        skipped: what was not checked, "" for whole calls, and why -> in how many calls.
        unguarded: why it could not be guarded, or "".
        of_gradients: whether it is about a captured graph's gradients.
        is_backward: whether it runs in the backward pass.
    """

    label: str
    source: str = ""
    calls: int = 0
    checked: int = 0
    failed: int = 0
    compared: int = 0
    skipped: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    unguarded: str = ""
    of_gradients: bool = False
    is_backward: bool = False

    def left_out(self) -> list[str]:
        """What was not checked, and why."""
        by_reason = dict(self.skipped)
        skipped_calls = sum(count for (part, _), count in by_reason.items() if not part)
        if self.checked and self.calls > self.checked + skipped_calls:
            by_reason["", "of `every`"] = self.calls - self.checked - skipped_calls
        return [
            f"{self.label}: {part}{count} of {self.calls} calls, because {why}"
            for (part, why), count in by_reason.items()
        ]


class GuardJournal:
    """Collects findings over all graphs of a guard; it is thread-safe.

    Attributes:
        explains: whether what kind of wrong the results of a graph are is of interest. The place
            where it starts is diagnosed in any case.
    """

    def __init__(self, *, strict: bool = False, explains: bool = True) -> None:
        """Start empty."""
        self.strict = strict
        self.explains = explains
        self.graphs: list[GraphEntry] = []
        self._findings: dict[tuple[str, Aspect], Finding] = {}
        self._repeats: dict[tuple[str, Aspect], int] = {}
        self._notes: dict[str, None] = {}
        self._lock = threading.RLock()
        self._captured = 0
        self._failed: list[FailedGraph] = []
        self.passes = 0
        self.splits = 0
        # Whether other threads were seen to draw random numbers during a check.
        self.others_draw = False

    def next_capture(self) -> int:
        """Return the number of the next captured graph."""
        with self._lock:
            self._captured += 1
            return self._captured - 1

    def enter(self, label: str, source: str = "", unguarded: str = "") -> GraphEntry:
        """Add a graph; `unguarded` is why it could not be guarded."""
        entry = GraphEntry(label, source, unguarded=unguarded)
        with self._lock:
            self.graphs.append(entry)
        return entry

    def count_call(self, entry: GraphEntry) -> None:
        """Count one call."""
        with self._lock:
            entry.calls += 1

    def note_skipped(self, entry: GraphEntry, part: str, reason: str) -> None:
        """Note that a call, or a part of it, was not checked."""
        with self._lock:
            entry.skipped[part, reason] += 1

    def note_call(self, entry: GraphEntry, part: Verdict) -> None:
        """Add one checked call."""
        with self._lock:
            entry.checked += 1
            entry.compared += part.coverage.compared
            entry.failed += bool(part.failures)
            self.add(part.findings, part.notes)

    def add(self, findings: Iterable[Finding], notes: Iterable[str] = ()) -> None:
        """Keep the gravest finding about each item, and count how often it occurred."""
        with self._lock:
            self._notes |= dict.fromkeys(notes)
            for finding in findings:
                key = (finding.path, finding.aspect)
                earlier = self._findings.get(key)
                if earlier is not None and finding.status is earlier.status:
                    self._repeats[key] += 1
                elif earlier is None or finding.status.gravity > earlier.status.gravity:
                    self._findings[key] = finding
                    self._repeats[key] = 1

    def keep(self, label: str, make: Callable[[], FailedGraph | None]) -> list[FailedGraph]:
        """Keep the first failing call of a graph, for the first few graphs."""
        with self._lock:
            failed_graphs = [failed for failed in self._failed if failed.label == label]
            if not failed_graphs and len(self._failed) < MOST_KEPT:
                failed_graph = make()
                failed_graphs = [] if failed_graph is None else [failed_graph]
                self._failed += failed_graphs
            return failed_graphs

    def verdict(self) -> Verdict:
        """Roll up everything seen so far. If nothing was checked, it is `unverified`."""
        with self._lock:
            findings = list(self._findings.values())
            findings += [
                unverified(entry.label, entry.unguarded, source=entry.source or None)
                for entry in self.graphs
                if entry.unguarded
            ]
            compared = sum(entry.compared for entry in self.graphs) + self.passes + self.splits
            skipped = tuple(line for entry in self.graphs for line in entry.left_out())
            no_graph = [] if self.graphs else [NO_GRAPH]
            verdict = Verdict(
                findings=tuple(findings),
                coverage=Coverage(compared=compared, skipped=skipped),
                notes=(*(self._notes or no_graph), *self._repetitions()),
                strict=self.strict,
            )
            remember_failed(verdict, self._failed)
            return verdict

    def summary(self) -> str:
        """Describe everything seen so far in one line."""
        verdict = self.verdict()
        with self._lock:
            graphs, calls = len(self.graphs), sum(entry.calls for entry in self.graphs)
            checked = sum(entry.checked for entry in self.graphs)
        counts = (
            f"{count_things(graphs, 'graph')}, {checked} of {count_things(calls, 'call')} checked"
        )
        line = f"{headline(verdict)} ({counts})"
        if not verdict.failures:
            return "; ".join((line, *verdict.notes))
        first = verdict.failures[0]
        return f"{line}; first: {first.path}" + (f" at {first.source}" if first.source else "")

    def _repetitions(self) -> list[str]:
        return [
            f"{finding.path}: {finding.status.value} in {self._repeats[key]} calls"
            for key, finding in self._findings.items()
            if self._repeats[key] > 1
            and finding.origin is None
            and not finding.status.passes(strict=self.strict)
        ]


# --- How a call differs ---------------------------------------------------------------------------

CALL_CHECKS = Checks(device=True)
RANDOM_NUMBERS = Item(ItemKind.RANDOM_STATE, "random numbers")
OTHERS_DRAW = "other threads used the random generators at the same time"
RANDOM_PART = "the random numbers of "
_EQUAL = frozenset({Status.IDENTICAL, Status.EQUIVALENT})


class Experience(LearntNoise):
    """What earlier calls of a graph showed about how compiled code and reference differ."""

    def __init__(self) -> None:
        """Start without any."""
        super().__init__()
        # One for all calls of a graph: a wrong program is wrong in the same way each time.
        self.explainer = Explainer()


class ExperienceGate:
    """Settles a value by its bits, or by what earlier calls of the graph showed.

    Attributes:
        settles: whether it gave a ruling.
    """

    def __init__(self, experience: Experience, item: Item, measured: PairDifference | None) -> None:
        """`measured` is the difference of the two values if that is known already."""
        self.experience = experience
        self.item = item
        self.measured = measured
        self.settles = False
        self._difference: Sizes | None = None
        self._ratios: Sizes | None = None

    def __call__(self, pair: Pair) -> Ruling | None:
        """The ruling; None if the value must be judged by the full rule."""
        reference, candidate, measured = pair.reference, pair.candidate, self.measured
        if measured is None and not _are_comparable(reference, candidate):
            return None
        same = quickly_equal(reference, candidate) if measured is None else measured.identical
        self.settles = same or self._is_explained(pair)
        if not self.settles:
            return None
        return Ruling(Status.IDENTICAL if same else Status.EQUIVALENT)

    def _is_explained(self, pair: Pair) -> bool:
        reference, candidate, measured = pair.reference, pair.candidate, self.measured
        self._difference = measured.sizes if measured else relative_difference(candidate, reference)
        if self.experience.explains_difference(self.item, self._difference):
            return True
        arbiter = pair.evidence.arbiter()
        self._ratios = None if arbiter is None else error_ratios(candidate, reference, arbiter)
        if not self.experience.explains_errors(self.item, self._ratios):
            return False
        self.experience.learn(self.item, self._difference, None)
        return True

    def learn(self) -> None:
        """Remember the difference: the full rule accepts it."""
        self.experience.learn(self.item, self._difference, self._ratios)


class CallComparer:
    """Compares one call, item by item; findings name the graph."""

    def __init__(
        self,
        runs: Evidence[Program],
        label: str,
        experience: Experience,
        compiled: GraphCode | None = None,
    ) -> None:
        """`runs` are the reference's runs; `compiled` is the code, if it can be called again."""
        self.runs = runs
        self.compiled = compiled
        self.label = label
        self.experience = experience
        self.out = CollectedFindings()

    def compare_values(self, reference: dict[Item, Any], candidate: dict[Item, Any]) -> None:
        """Compare named values; a value that only one side has is a finding."""
        alike = {
            item: (_detach_value(candidate[item]), _detach_value(value))
            for item, value in reference.items()
            if item in candidate and _are_comparable(value, candidate[item])
        }
        measured = dict(zip(alike, differences(list(alike.values())), strict=True))
        for item, value in reference.items():
            if item not in candidate:
                self._add(item, Aspect.STRUCTURE, "the compiled code does not return it")
                continue
            self.compare_value(item, value, candidate[item], measured.get(item))
        for item in candidate:
            if item not in reference:
                reason = "the compiled code returns it, the graph does not"
                self._add(item, Aspect.STRUCTURE, reason)

    def compare_value(
        self, item: Item, reference: Any, candidate: Any, measured: PairDifference | None = None
    ) -> None:
        """Compare one value; `measured` is its difference if that is known already."""
        if reference is None and candidate is None:
            return
        if _has_parts(reference) or _has_parts(candidate):
            self._compare_parts(item, reference, candidate)
            return
        self.out.compared += 1
        values = _detach_value(reference), _detach_value(candidate)
        context = functools.partial(self._context, item, *values)
        pair = Pair(item.in_graph(self.label), *values, ItemEvidence(self.runs, item), context)
        gate = ExperienceGate(self.experience, item, measured)
        explainer = self.experience.explainer
        findings, notes = judge_pair(pair, CALL_CHECKS, gates=(gate,), explainer=explainer)
        if not gate.settles and all(f.status in _EQUAL for f in findings):
            gate.learn()
        self.out.findings += findings
        self.out.notes += notes + explainer.notes
        explainer.notes.clear()

    def _compare_parts(self, item: Item, reference: Any, candidate: Any) -> None:
        """Compare tensors that are not dense: first their kind, then each part."""
        left, right = (
            flatten_value(_detach_value(reference), item.name),
            flatten_value(_detach_value(candidate), item.name),
        )
        matching = match(left, right, CALL_CHECKS, item)
        for finding in matching.findings:
            self._add(finding.item, finding.aspect, finding.reason)
        for part, reference_part, other in matching.pairs:
            self.compare_value(part, reference_part, other)

    def _context(self, item: Item, reference: Any, candidate: Any) -> Context:
        """The context for a diagnosis; an input that should have changed may be as it was."""
        from paritas.core.diagnosis.case import Context

        given_inputs = self.runs.program.known_arguments()
        before = given_inputs.get(item.name)
        is_after = item.kind is ItemKind.INPUT_AFTER_CALL
        earlier: dict[str, Tensor] = {}
        if is_after and isinstance(before, torch.Tensor):
            earlier["what it was before the call"] = before
        draws = self.runs.depends_on_draws(0, item)
        operator, call = gradient_call(self.runs.program) or ("", None)
        runs = None
        if call is not None and self.compiled is not None:
            pair = reference.detach(), candidate.detach()
            runs = gradient_runs(self.runs.program, self.compiled, item.name, pair)
        return Context(
            operator=operator,
            named=likely_mixups(given_inputs, reference),
            earlier=earlier,
            draws=draws,
            call=call,
            runs=runs,
        )

    def compare_strides(
        self, reference: Observation, candidate: Observation, promised: dict[Item, tuple[int, ...]]
    ) -> None:
        """Compare the strides of outputs that the user sees; `promised` are the traced ones."""
        for item, traced in promised.items():
            if item not in candidate.outputs:
                continue
            candidate_strides, reference_strides = (
                _strides_of(candidate.outputs[item]),
                _strides_of(reference.outputs[item]),
            )
            if candidate_strides is None or reference_strides is None:
                continue
            shape = candidate.outputs[item].shape
            if shape != reference.outputs[item].shape:
                continue  # reported already
            if any(
                _have_same_strides(shape, candidate_strides, other)
                for other in (reference_strides, traced)
            ):
                continue
            self._add(
                item,
                Aspect.STRIDE,
                f"strides {list(candidate_strides)} instead of {list(reference_strides)}",
            )

    def compare_aliases(
        self,
        reference: Observation,
        candidate: Observation,
        visible: set[Item],
        donated: set[Item] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """Compare which visible outputs share memory with what; donated inputs may be reused."""

        def visible_aliases(observation: Observation) -> set[tuple[Item, Item]]:
            shared = {(a, b) for a, b in observation.aliases if b in visible}
            # Two outputs that share memory matter only if the user sees both.
            shared = {(a, b) for a, b in shared if a not in observation.outputs or a in visible}
            return {(a, b) for a, b in shared if a not in donated}

        left, right = visible_aliases(reference), visible_aliases(candidate)
        for shared_item, other in in_order(right - left):
            self._add(
                other, Aspect.ALIAS, f"shares memory with {shared_item}; in the graph it does not"
            )
        for shared_item, other in in_order(left - right):
            self._add(
                other,
                Aspect.ALIAS,
                f"does not share memory with {shared_item}; in the graph it does",
            )

    def compare_random(
        self, expected: RandomState | None, random_state: RandomState | None
    ) -> None:
        """Compare the states of the random generators after the call."""
        if are_other_states(expected, random_state):
            reason = "the compiled code leaves torch's random generators in another state"
            self._add(RANDOM_NUMBERS, Aspect.RNG, reason)

    def compare_untouched(self, inputs: dict[str, tuple[Tensor, Any]]) -> None:
        """Report inputs, before and after, that the code writes to and the graph does not."""
        tensor_pairs = {
            name: pair for name, pair in inputs.items() if isinstance(pair[1], torch.Tensor)
        }
        pairs = [
            (_detach_value(before), _detach_value(after)) for before, after in tensor_pairs.values()
        ]
        for name, pair, same in zip(tensor_pairs, pairs, all_equal(pairs), strict=True):
            if same:
                continue
            item = after_call(name).in_graph(self.label)
            reason = "the compiled code writes to this input, the graph does not"
            metrics = pair_metrics(*pair)
            self.out.findings.append(mismatch(item, Aspect.VALUE, reason, metrics=metrics))

    def _add(self, item: Item, aspect: Aspect, reason: str) -> None:
        self.out.compared += 1
        self.note(item, aspect, reason)

    def note(self, item: Item, aspect: Aspect, reason: str) -> None:
        """Report something that was seen besides what is compared."""
        self.out.add(item.in_graph(self.label), aspect, Status.DIFFERENT, reason)


def are_other_states(expected: RandomState | None, random_state: RandomState | None) -> bool:
    """Whether torch's generators are in other states than expected."""
    return (
        expected is not None and random_state is not None and not expected.same_torch(random_state)
    )


def _are_comparable(reference: Any, candidate: Any) -> bool:
    """Whether both are floating tensors that can differ only in their values."""
    return (
        is_inexact(reference)
        and isinstance(candidate, torch.Tensor)
        and reference.dtype is candidate.dtype
        and reference.shape == candidate.shape
        and reference.device == candidate.device
        and is_dense(reference)
        and is_dense(candidate)
    )


def _has_parts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_dense(value)


def _detach_value(value: Any) -> Any:
    # A plain tensor that autograd does not track needs no detach; a subclass does.
    if type(value) is torch.Tensor and not value.requires_grad:
        return value
    return value.detach() if isinstance(value, torch.Tensor) else value


def _strides_of(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return tuple(value.stride())


def _have_same_strides(shape: torch.Size, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Compare strides; those of dimensions of length one and of empty tensors do not count."""
    if 0 in shape:
        return True
    if len(left) != len(right):
        return False
    return all(a == b for size, a, b in zip(shape, left, right, strict=True) if size > 1)


# --- Guarded code of every kind -------------------------------------------------------------------


class GuardedCode:
    """Compiled code with a schedule of checks and a journal for their results."""

    def __init__(self, settings: GuardSettings, journal: GuardJournal, entry: GraphEntry) -> None:
        """`entry` is the graph's entry in the journal."""
        self.settings = settings
        self.journal = journal
        self.entry = entry
        self.schedule = Schedule(settings.every, settings.seed)
        self.experience = Experience()
        if not journal.explains:
            self.experience.explainer.left = 0
        self.made_by: GraphMaker | None = None
        self._lock = threading.Lock()

    def is_due(self, args: Any, *, draws: bool) -> bool:
        """Count a call; return whether to check it. `draws`: the graph draws random numbers."""
        require_time(self.settings.limit)
        self.journal.count_call(self.entry)
        with self._lock:
            due = self.schedule.due(tuple(value for value in args if isinstance(value, int)))
        if due and draws and self.journal.others_draw:
            # A check would give the other threads the same numbers as this one.
            self.skip(OTHERS_DRAW)
            return False
        return due

    def skip(self, reason: str, part: str = "") -> None:
        """Note that a call, or a part of it, is not checked."""
        self.journal.note_skipped(self.entry, part, reason)

    def is_disturbed(
        self,
        expected: RandomState | None,
        random_state: RandomState | None,
        threads: ThreadTimes,
        *,
        draws: bool,
    ) -> bool:
        """Whether generators differ, and other threads may have caused it; notes that.

        The generators belong to all threads. If the graph draws from them, too, its values cannot
        be compared either.
        """
        if not are_other_states(expected, random_state) or not threads.others_ran():
            return False
        self.journal.others_draw |= draws
        self.skip(OTHERS_DRAW, "" if draws else RANDOM_PART)
        return True

    def comparer(self, runs: Evidence[Program], compiled: GraphCode | None = None) -> CallComparer:
        """Make a comparer for one call; of this code, if it can be called again."""
        return CallComparer(runs, self.entry.label, self.experience, compiled)

    def rolled_up(self, out: CollectedFindings, runs: Evidence[Program]) -> Verdict:
        """Make the verdict about one call."""
        out.notes += [f"{self.entry.label}: {note}" for note in runs.notes]
        return out.verdict(strict=self.settings.strict)

    def judge_safely(self, judge: Callable[[], Verdict]) -> Verdict:
        """The verdict about one call; that of a check that failed itself says so."""
        try:
            return judge()
        except Exception as error:  # noqa: BLE001  (our own error must not break the program)
            return self.own_failure(error)

    def own_failure(self, error: Exception) -> Verdict:
        """The verdict for a check that failed itself; the program continues."""
        out = CollectedFindings()
        reason = f"the check itself failed: {in_one_line(error, 120)}"
        out.add(CALL.in_graph(self.entry.label), Aspect.HARNESS, Status.UNVERIFIED, reason)
        return out.verdict(strict=self.settings.strict)

    def judge_errors(
        self, out: CollectedFindings, reference: Exception | None, candidate: Exception | None
    ) -> bool:
        """Report what either side raised; return whether there was anything to report."""
        item = CALL.in_graph(self.entry.label)
        if candidate is None:
            if reference is None:
                return False
            reason = f"the graph, run op by op, raises {in_one_line(reference, 120)}"
            out.add(item, Aspect.HARNESS, Status.UNVERIFIED, reason)
        elif reference is None:
            reason = f"the compiled code raises {in_one_line(candidate, 120)}; the graph does not"
            raised = type(candidate).__name__
            out.add(item, Aspect.EXCEPTION, Status.UNVERIFIED, reason, raised=raised)
        else:
            reason = f"both raise; the compiled code raises {in_one_line(candidate, 120)}"
            out.add(item, Aspect.EXCEPTION, Status.UNVERIFIED, reason)
        return True

    def conclude(
        self,
        verdict: Verdict,
        results: Any,
        error: Exception | None,
        substitute: Callable[[], Any],
        called: tuple[GraphModule, Sequence[Any]] | None = None,
    ) -> Any:
        """Add the call to the journal, and return what the program gets under the settings.

        Args:
            called: the graph and its original arguments, kept if the call fails.
        """
        self.journal.note_call(self.entry, verdict)
        differs = [f for f in verdict.failures if f.status is not Status.UNVERIFIED]
        if differs and called is not None:
            remember_failed(
                verdict,
                self.journal.keep(self.entry.label, lambda: self._keep_failed_graph(*called)),
            )
        action = self.settings.on_mismatch
        if differs and action == "raise":
            raise MismatchError(str(verdict), verdict) from error
        # A call that could not be checked does not stop the program, but is always reported.
        if verdict.failures and action != "record":
            warnings.warn(str(verdict), ParityWarning, stacklevel=3)
        # If both raise, the program gets the error of the compiled code.
        only_compiled_raises = any(finding.raised for finding in verdict.failures)
        if (differs or only_compiled_raises) and action == "fallback":
            return substitute()
        if error is not None:
            raise error
        return results

    def _keep_failed_graph(
        self, module: GraphModule, kept_values: Sequence[Any]
    ) -> FailedGraph | None:
        """Keep a call with copies of its arguments: the program may change them later."""
        if self.made_by is None:
            return None
        copier = Copier()
        try:
            inputs = [copier.copy_tree(value) for value in kept_values]
        except Exception as error:  # noqa: BLE001  (out of memory, say; only shrinking needs them)
            note = f"{self.entry.label}: could not keep its arguments: {in_one_line(error, 120)}"
            self.journal.add((), [note])
            return None
        return FailedGraph(self.entry.label, module, inputs, self.made_by, self.entry.of_gradients)


# --- Where a call that differed starts to differ --------------------------------------------------

if TYPE_CHECKING:
    SuspectT = TypeVar("SuspectT", bound="Suspect")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspect:
    """A call that differed, with what is needed to find where the difference starts.

    Attributes:
        label: the graph's name in findings.
        failures: the findings that do not pass.
        settings: of its guard.
    """

    label: str
    failures: tuple[Finding, ...]
    settings: GuardSettings

    def place(self, origin: Origin, reason: str, failure: Finding, **about: Any) -> Finding:
        """The finding about a place that one of its failures comes from."""
        item = origin_item(self.label, origin)
        source = origin.source or None
        return starting_place(item, failure, reason, source=source, origin=origin, **about)


def origin_item(label: str, where: Origin) -> Item:
    """The item of a finding about an origin in the graph with this label."""
    if where.kind is OriginKind.NODE:
        return Item(ItemKind.NODE, where.name, graph=label)
    named = f"{where.kind.value} {where.name}"
    if where.kind is OriginKind.GRAPH:  # its name is the label
        named = "the whole graph"
    return Item(ItemKind.ORIGIN, named, graph=label)


def locate_safely(locator: Callable[[SuspectT], list[Finding]], suspect: SuspectT) -> list[Finding]:
    """Find where a difference starts; an exception in the search becomes a finding."""
    try:
        return locator(suspect)
    except Exception as error:  # noqa: BLE001
        item = harness("where it starts").in_graph(suspect.label)
        reason = f"the search for it failed: {in_one_line(error, 120)}"
        origin = Origin(kind=OriginKind.GRAPH, name=suspect.label)
        return [unverified(item, reason, origin=origin)]


def with_places(places: list[Finding], verdict: Verdict) -> Verdict:
    """The verdict with the places where its failures start, the first as their cause."""
    verdict = caused_by(places, verdict)
    return msgspec.structs.replace(verdict, findings=(*places, *verdict.findings))


def caused_by(places: list[Finding], verdict: Verdict) -> Verdict:
    """The verdict with the first place, if one was found, as the cause of all that is wrong."""
    cause = next((position.path for position in places if position.status.is_wrong), None)
    findings = [
        without_kind(msgspec.structs.replace(finding, cause=cause))
        if cause is not None and finding.status.is_wrong
        else finding
        for finding in verdict.findings
    ]
    return msgspec.structs.replace(verdict, findings=tuple(findings))


def is_same_memory(value: Any, original: Any) -> bool:
    """Whether two tensors are the same view of the same memory."""
    if not isinstance(value, torch.Tensor) or not isinstance(original, torch.Tensor):
        return False
    return (
        storage_address(value) == storage_address(original) != 0
        and value.dtype is original.dtype
        and value.shape == original.shape
        and value.stride() == original.stride()
        and value.storage_offset() == original.storage_offset()
    )
