"""One program, its faults and its rewrites: what each rule says, and what the truth is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from benchmarks.detection.benign import rewrite
from benchmarks.detection.cases import Unit, drawn_benign, drawn_mutants
from benchmarks.detection.graded import GRADED, graded
from benchmarks.detection.locating import Located, Locator, distance
from benchmarks.detection.programs import allow_tf32, make_program
from benchmarks.detection.rules import OURS, Values, judged, rules

from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.torch_private.graphs import as_traced
from paritas.mutants.planting import measure_effect, plant, program_noise

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.mutants.programs import FlatProgram

MUTANT, BENIGN = "mutant", "benign"
# JSON has no infinity, which is the effect of what has no noise: integers, NaN, dtypes, aliases.
BEYOND_NUMBERS = 1e99


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One case.

    Attributes:
        unit: the program it is made from.
        kind: `mutant` or `benign`.
        change: name of the mutation or of the rewrite.
        node: where it was made.
        detail: which of several ways.
        band: clear, moderate, faint, or none for a mutant that is equivalent.
        over_noise: its exact effect in multiples of the noise.
        relative: its exact effect over the size of the result.
        alarms: what each rule said; a text is why it said nothing.
        seconds: that each rule took.
        bits: whether any result has other bits than the reference's.
        said: the node that was named as the first wrong one.
        how: by its native value, by its lifted one, or by where it lies in memory.
        distance: edges from there to the truth; None if nothing was named.
        pattern: what kind of wrong it was called there.
        confidence: stated with it.
        error: why the case could not be made; it is no case then.
    """

    unit: Unit
    kind: str
    change: str
    node: str
    detail: str = ""
    band: str = ""
    over_noise: float = 0.0
    relative: float = 0.0
    alarms: dict[str, bool | str] = {}
    seconds: dict[str, float] = {}
    bits: bool = False
    said: str = ""
    how: str = ""
    distance: int | None = None
    pattern: str = ""
    confidence: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.unit}: {self.change} at {self.node}{detail}"

    @property
    def caught(self) -> bool:
        """Whether ours alarms."""
        return self.alarms.get(OURS) is True


class Measuring:
    """One unit: what is known of its program is measured once."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.program: FlatProgram = make_program(unit.name, unit.seed, unit.dtype, unit.device)
        torch.manual_seed(0)
        self.noise = program_noise(self.program)
        self.arbiter = list(self.noise.base.outputs.values())
        self.reference = results_of(self.program, self.program.module)
        self.rules = rules()
        self._locator: Locator | None = None

    def run(self) -> list[Outcome]:
        """All cases of the unit."""
        planted = [self._planted(site) for site in drawn_mutants(self.unit, self.program)]
        outcomes = [outcome for outcome, _ in planted if outcome.band in {"", "none"}]
        for outcome, mutant in chosen(planted, self.unit.mutants):
            self._ask(outcome, mutant)
            if outcome.caught:
                self._locate(outcome, mutant)
            outcomes.append(outcome)
        outcomes += self._graded()
        rewritten = [self._rewritten(site) for site in drawn_benign(self.unit, self.program)]
        outcomes += [outcome for outcome, _ in rewritten if outcome.error]
        for outcome, changed in _telling(rewritten, self.unit.benign):
            self._ask(outcome, changed)
            outcomes.append(outcome)
        return outcomes

    def _planted(self, site: Any) -> tuple[Outcome, GraphModule | None]:
        """A fault with its effect, which no rule had a part in."""
        outcome = Outcome(
            unit=self.unit, kind=MUTANT, change=site.mutation, node=site.node, detail=site.detail
        )
        mutant = None
        try:
            mutant = plant(self.program, site)
            if mutant is None:
                outcome.error = "it does not apply"
                return outcome, None
            effect = measure_effect(self.program, mutant, self.noise)
        except Exception as error:  # noqa: BLE001  (kept with the case, which then is none)
            outcome.error = told(error)
            return outcome, None
        outcome.band = effect.band
        outcome.over_noise = min(effect.over_noise, BEYOND_NUMBERS)
        outcome.relative = min(effect.relative, BEYOND_NUMBERS)
        return outcome, mutant

    def _graded(self) -> list[Outcome]:
        """Faults of sizes near the limit."""
        outcomes = []
        for fault in graded(self.program, self.noise, self.unit.graded, str(self.unit)):
            outcome = Outcome(unit=self.unit, kind=MUTANT, change=GRADED, node=fault.node)
            outcome.detail = f"by {fault.delta:.2g}"
            outcome.band, outcome.relative = fault.effect.band, fault.effect.relative
            outcome.over_noise = fault.effect.over_noise
            self._ask(outcome, fault.mutant)
            if outcome.caught:
                self._locate(outcome, fault.mutant)
            outcomes.append(outcome)
        return outcomes

    def _rewritten(self, site: Any) -> tuple[Outcome, GraphModule | None]:
        """A rewrite, and whether it changes any bit."""
        outcome = Outcome(
            unit=self.unit, kind=BENIGN, change=site.rewrite, node=site.node, detail=site.detail
        )
        changed = None
        try:
            changed = rewrite(self.program, site)
            if changed is None:
                outcome.error = "it does not apply"
                return outcome, None
            results = results_of(self.program, changed)
        except Exception as error:  # noqa: BLE001  (kept with the case, which then is none)
            outcome.error = told(error)
            return outcome, None
        outcome.bits = not all(map(same_bits, self.reference, results))
        return outcome, changed

    def run_candidate(self, changed: Any) -> list[Tensor]:
        """What a candidate gives."""
        return results_of(self.program, changed)

    def _ask(self, outcome: Outcome, changed: Any) -> None:
        """Every rule, each on its own clock."""
        try:
            candidate = self.run_candidate(changed)
        except Exception as error:  # noqa: BLE001  (kept with the case, which then is none)
            outcome.error = told(error)
            return
        values = Values(
            self.noise, changed, self.unit.dtype, self.reference, candidate, self.arbiter
        )
        outcome.bits = not all(map(same_bits, self.reference, candidate))
        for name, rule in self.rules.items():
            began = time.perf_counter()
            outcome.alarms[name] = judged(rule, values)
            outcome.seconds[name] = round(time.perf_counter() - began, 5)

    def _locate(self, outcome: Outcome, mutant: GraphModule) -> None:
        began = time.perf_counter()
        try:
            if self._locator is None:
                self._locator = Locator(self.program, self.noise)
            found = self._locator.locate(mutant)
        except Exception as error:  # noqa: BLE001  (a search that fails has found nothing)
            outcome.said, found = told(error), Located()
        else:
            outcome.said, outcome.how = found.node, found.how
        outcome.distance = distance(self.program, outcome.node, found.node)
        outcome.pattern, outcome.confidence = found.pattern, found.confidence
        outcome.seconds["locating"] = round(time.perf_counter() - began, 5)


def chosen(
    planted: list[tuple[Outcome, GraphModule | None]], count: int
) -> list[tuple[Outcome, GraphModule]]:
    """So many visible faults, moderate ones first, up to half of them: most faults are clear."""
    seen = [(one, mutant) for one, mutant in planted if mutant and one.band not in {"", "none"}]
    moderate = [pair for pair in seen if pair[0].band == "moderate"][: count // 2]
    others = [pair for pair in seen if all(pair[0] is not one for one, _ in moderate)]
    return [*moderate, *others][:count]


def _telling(
    rewritten: list[tuple[Outcome, GraphModule | None]], count: int
) -> list[tuple[Outcome, GraphModule]]:
    """So many rewrites, those that change bits first: the others hardly put a rule to the test."""
    made = [(one, changed) for one, changed in rewritten if changed is not None]
    return sorted(made, key=lambda pair: not pair[0].bits)[:count]


def results_of(program: FlatProgram, module: GraphModule) -> list[Tensor]:
    """What a graph with the program's inputs gives."""
    torch.manual_seed(0)
    with as_traced():
        return list(module(*program.fresh_inputs()))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two results are of one shape and dtype, and equal bit for bit."""
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and bitwise_equal(left.detach(), right.detach())


def told(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]


class Entry(msgspec.Struct):
    """A unit that is done, or why it could not be."""

    unit: Unit
    outcomes: list[Outcome] = []
    error: str = ""


def measured(unit: Unit) -> Entry:
    """One unit; a program that cannot be measured is told, not dropped."""
    torch.set_num_threads(1)
    allow_tf32(unit.dtype)
    try:
        return Entry(unit, Measuring(unit).run())
    except Exception as error:  # noqa: BLE001  (kept in the journal and counted)
        return Entry(unit, error=told(error))


def measured_before(until: float, unit: Unit) -> Entry | None:
    """One unit, if it is not too late to begin; the clock is the same in all processes."""
    return measured(unit) if time.monotonic() < until else None
