"""A graph below AOTAutograd, with its compiled code checked against it as it is called."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas._torch.equality import with_tolerant_equality
from paritas._torch.graphs import is_undefined, placeholders, returned
from paritas._torch.naming import lowered_input_names, lowered_output_names
from paritas.checking.guarding.calls import GuardedCode, located, same_place
from paritas.checking.guarding.graph_runs import GraphRuns, ReferenceGraph, written_copied
from paritas.checking.guarding.substituting import substitute
from paritas.checking.observing import Observation, memory
from paritas.numerics.device_differences import all_equal
from paritas.numerics.findings import Status
from paritas.recording.isolation import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas._torch.inductor import LoweredGraph
    from paritas.checking.comparing import Collected
    from paritas.checking.guarding.comparing import CallComparer
    from paritas.checking.guarding.journal import GraphEntry, Journal
    from paritas.checking.guarding.settings import GuardSettings
    from paritas.numerics.findings import Finding, Verdict

    Locator = Callable[["Suspect"], list[Finding]]


# Inputs that should stay as they are: looked at in so many checked calls, then in each so-manieth.
CALLS_WATCHED = 8


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A call that differed, with everything needed to look for where it starts.

    Attributes:
        lowered: the graph and the circumstances of its compilation.
        runs: the reference's runs on the arguments of the call.
        candidate: what the compiled code gave.
        label: what findings about the graph begin with.
        failures: the findings that do not pass.
        compare: compares what other code for this graph gave, and the arguments as it left them,
            with what the reference did.
    """

    lowered: LoweredGraph
    runs: GraphRuns
    candidate: Observation
    label: str
    failures: tuple[Finding, ...]
    compare: Callable[[Observation, list[Any]], list[Finding]]


class GuardedGraph(GuardedCode):
    """Compiled code that takes its arguments in a list and empties it.

    Attributes:
        late_findings: what the compile found out, to be told with the next call.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        compiled: Callable[[list[Any]], Sequence[Any]],
        captured_names: list[str],
        settings: GuardSettings,
        journal: Journal,
        entry: GraphEntry,
        locator: Locator | None,
    ) -> None:
        """`captured_names` are those of the inputs of the captured graph it comes from."""
        super().__init__(settings, journal, entry)
        # On the instance, where torch's own wrappers around it look for it.
        self._boxed_call = True
        self.lowered = lowered
        self.compiled = compiled
        self.locator = locator
        self.reference = ReferenceGraph.of(
            lowered.module,
            lowered_input_names(lowered.module, captured_names),
            lowered_output_names(lowered.module, captured_names),
        )
        self.late_findings: list[Finding] = []
        self._may_change = self.reference.written | lowered.donated
        self._promised = self._promised_strides()
        self._located: list[Finding] | None = None
        self._tolerant: tuple[ReferenceGraph, ...] | None = None
        positions = {node.name: index for index, node in enumerate(placeholders(lowered.module))}
        named = zip(self.reference.outputs, returned(lowered.module), strict=False)
        self._undefined = {name for name, node in named if is_undefined(node)}
        self._handed_on = [positions.get(str(value)) for value in returned(lowered.module)]
        # What the compiled code may use up, and what nobody looks at afterwards.
        self._given_away = lowered.donated - self.reference.written - {*self._handed_on}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the compiled code, and the check where one is due."""
        if not self.is_due(args):
            return self.compiled(args)
        given = list(args)
        kept = written_copied(given, self._may_change)
        for position in self._given_away:
            given[position] = None  # so that it is held twice no longer than need be
        before = self._clones(kept, given) if self._looks_at_inputs() else {}
        rng = RandomState.of_torch()
        candidate = Observation()
        results: Sequence[Any] = ()
        try:
            results = self.compiled(args)
        except Exception as error:  # noqa: BLE001  (what it raises is a finding, then raised)
            candidate.error = error
        candidate.rng_after = RandomState.of_torch()
        if candidate.error is None:
            self.reference.name_results(candidate, list(results), given)
        for position in _touched(given, before):
            kept[position] = before[position]
        before.clear()  # before the reference takes its own room
        runs = GraphRuns(self.reference, kept, rng, self.settings.seed)
        try:
            verdict = self._judge(runs, candidate, given)
        except Exception as error:  # noqa: BLE001  (of ours; the program must not suffer from it)
            verdict = self.own_failure(error)
        finally:
            candidate.rng_after.restore()
        return self.conclude(  # type: ignore[no-any-return]
            verdict,
            results,
            candidate.error,
            lambda: substitute(runs, candidate, given, self.lowered.visible),
            (self.lowered.module, kept),
        )

    def _looks_at_inputs(self) -> bool:
        """Whether to see that no other input is written to.

        Generated code writes to it always or never, so that the first calls tell most of it.
        """
        checked = self.entry.checked
        return checked < CALLS_WATCHED or checked % CALLS_WATCHED == 0

    def _clones(self, kept: list[Any], given: list[Any]) -> dict[int, Tensor]:
        """The values of the arguments that nothing should write to."""
        return {
            position: value.detach().clone()
            for position, (mine, value) in enumerate(zip(kept, given, strict=True))
            if mine is value and isinstance(value, torch.Tensor)
        }

    def _judge(self, runs: GraphRuns, candidate: Observation, given: list[Any]) -> Verdict:
        collected = self._compare(runs, candidate, given)
        self._ask_again(collected, runs, candidate, given)
        verdict = self.rolled_up(collected, runs)
        if verdict.failures and candidate.error is None and runs.native[0].error is None:
            verdict = self._with_origin(verdict, runs, candidate)
        if verdict.passed:
            runs.become_lean()
        if not self.late_findings:
            return verdict
        late, self.late_findings = self.late_findings, []
        return msgspec.structs.replace(verdict, findings=(*late, *verdict.findings))

    def _ask_again(
        self, collected: Collected, runs: GraphRuns, candidate: Observation, given: list[Any]
    ) -> None:
        """What differs only by an equality of rounded numbers is decided by rounding."""
        if all(f.status.passes() for f in collected.findings) or candidate.error is not None:
            return
        if self._tolerant is None:
            module = with_tolerant_equality(self.reference.module)
            self._tolerant = (
                ()
                if module is None
                else (
                    ReferenceGraph.of(module, [*self.reference.inputs], [*self.reference.outputs]),
                )
            )
        for reference in self._tolerant:
            others = GraphRuns(reference, runs.kept, runs.rng, self.settings.seed)
            again = self._compare(others, candidate, given)
            better = {(f.path, f.aspect) for f in again.findings if f.status.passes()}
            collected.findings = [
                _decided_by_rounding(finding)
                if not finding.status.passes() and (finding.path, finding.aspect) in better
                else finding
                for finding in collected.findings
            ]

    def _compare(self, runs: GraphRuns, candidate: Observation, given: list[Any]) -> Collected:
        comparer = self.comparer(runs)
        reference = runs.native[0]
        if self.judge_errors(comparer.out, reference.error, candidate.error):
            return comparer.out
        same = self._handed_on_names(candidate, given)
        comparer.out.compared += len(same)
        comparer.out.skipped += [
            f"{self.entry.label}: {name}, which is not defined" for name in self._undefined
        ]
        same |= self._undefined
        comparer.compare_random(reference, candidate)
        comparer.compare_values(
            _without(reference.outputs, same), _without(candidate.outputs, same)
        )
        comparer.compare_values(reference.after, candidate.after)
        comparer.compare_strides(reference, candidate, self._promised)
        self._compare_aliases(comparer, runs, candidate, given)
        pairs = enumerate(zip(runs.kept, given, strict=True))
        comparer.compare_untouched(
            {
                self.reference.inputs[position]: (before, after)
                for position, (before, after) in pairs
                if before is not after and position not in self._may_change
            }
        )
        return comparer.out

    def _compare_aliases(
        self, comparer: CallComparer, runs: GraphRuns, candidate: Observation, given: list[Any]
    ) -> None:
        """Only what outputs that the user sees share is looked at: nobody else could tell."""
        reference = runs.native[0]
        places = [memory(value) for value in given]
        pairs = zip(runs.used, given, places, strict=True)
        used = [place if mine is theirs else memory(mine) for mine, theirs, place in pairs]
        reference.aliases = self.reference.aliases(reference, runs.used, used, self._promised)
        candidate.aliases = self.reference.aliases(candidate, given, places, self._promised)
        donated = {self.reference.inputs[position] for position in self.lowered.donated}
        comparer.compare_aliases(reference, candidate, set(self._promised), donated)

    def _handed_on_names(self, candidate: Observation, given: list[Any]) -> set[str]:
        """The outputs that are inputs, as they should be: no need to compare their bits."""
        same = set()
        for name, position in zip(self.reference.outputs, self._handed_on, strict=False):
            if position is None or position in self.reference.written:
                continue
            value, original = candidate.outputs.get(name), given[position]
            if value is original or same_place(value, original):
                same.add(name)
        return same

    def _with_origin(self, verdict: Verdict, runs: GraphRuns, candidate: Observation) -> Verdict:
        if self._located is None:
            self._located = []
            if self.locator is not None:
                suspect = Suspect(
                    self.lowered,
                    runs,
                    candidate,
                    self.entry.label,
                    verdict.failures,
                    lambda seen, given: self._compare(runs, seen, given).findings,
                )
                self._located = located(self.locator, suspect)
        return msgspec.structs.replace(verdict, findings=(*self._located, *verdict.findings))

    def _promised_strides(self) -> dict[str, tuple[int, ...]]:
        """The strides that outputs which the user sees had when the graph was traced."""
        promised = {}
        values = returned(self.lowered.module)
        for position in sorted(self.lowered.visible):
            traced = getattr(values[position], "meta", {}).get("val")
            if isinstance(traced, torch.Tensor) and traced.layout is torch.strided:
                strides = tuple(step if isinstance(step, int) else -1 for step in traced.stride())
                promised[self.reference.outputs[position]] = strides
        return promised


def _decided_by_rounding(finding: Finding) -> Finding:
    reason = "which of its own values equals a saved one, rounding decides; else the two agree"
    return msgspec.structs.replace(finding, status=Status.UNSTABLE, reason=reason)


def _touched(given: list[Any], before: dict[int, Tensor]) -> list[int]:
    """The arguments whose bits changed."""
    pairs = [(given[position].detach(), value) for position, value in before.items()]
    return [position for position, same in zip(before, all_equal(pairs), strict=True) if not same]


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
