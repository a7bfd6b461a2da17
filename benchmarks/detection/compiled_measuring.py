"""One program through torch's compiler: right, and with faults in it."""

from __future__ import annotations

import random
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_compiled import PLAIN, VARIANTS, compiled_variant
from benchmarks.detection.cases import HALVES, Unit, drawn_mutants
from benchmarks.detection.families import FAMILIES
from benchmarks.detection.lowered_faults import (
    FaultyPass,
    guarded_verdict,
    lowered_program,
    said_of,
)
from benchmarks.detection.measuring import BENIGN, MUTANT, Entry, Measuring, Outcome, chosen, told
from benchmarks.detection.programs import DTYPES, impossible
from benchmarks.detection.summing import NO_VALUES

from paritas.core.results.findings import Status
from paritas.core.torch_private.graphs import trace_calls
from paritas.mutants.planting import FaultSite, measure_effect, plant, program_noise

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.core.results.findings import Verdict
    from paritas.mutants.programs import FlatProgram

# A fault that a pass of the compiler brings in, asked of the guard.
PLANTED = "planted"
GUARD, GUARDED = "guard", "guarded_inductor"
# What leaves a compiler something to fuse or to decompose: for the others it calls eager's kernels,
# or rounds where eager does, and all bits are the same.
OPERATORS_COMPILED = (
    "softmax",
    "log_softmax",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "l2_normalise",
    "attention",
    "swiglu",
    "bilinear_pool",
    "deviation",
    "variance",
    "product",
    "cross_entropy",
    "kl_loss",
    "entropy",
    "gather",
    "in_place",
    "waves",
    "complex_product",
    "powers",
    "ratio",
    "logistic_loss",
    "dropout_mask",
    "far_layer_norm",
    "huge",
)
# Calls of a program above which a fault is not looked for in it: each takes three compiles or more.
MOST_CALLS_LOCATED = 160
# One family after so many operators.
OPERATORS_BETWEEN = 8
# So many variants of a program are tried that no compiler has changed a bit of.
VARIANTS_OF_EQUAL_BITS = 2
# A value that goes to a narrower dtype and back in one kernel is not rounded there, which is what
# Inductor says of itself (`emulate_precision_casts`): the fault is compiled away.
COMPILED_AWAY = "internal_downcast"


def compiled_units() -> list[Unit]:
    """Programs that are compiled, in an order in which any beginning is a fair sample.

    An operator in every dtype, a family, whose compilation takes a minute, in one dtype for each
    half.
    """
    operators = [
        Unit(name, seed, dtype, "cpu", 2, 0, 8)
        for name in OPERATORS_COMPILED
        for seed in HALVES.values()
        for dtype in DTYPES
        if impossible(name, dtype) is None
    ]
    families = [
        Unit(name, seed, dtype, "cpu", 1, 0, 2)
        for name in FAMILIES
        for seed, dtype in enumerate(random.Random(f"compiled {name}").sample(DTYPES, len(HALVES)))
    ]
    for some in (operators, families):
        some.sort(key=lambda unit: random.Random(f"compiled {unit}").random())
    # A family has the place of every so-manieth; what is left of them comes last.
    found = []
    for number, unit in enumerate(operators):
        found.append(unit)
        if number % OPERATORS_BETWEEN == OPERATORS_BETWEEN // 2 and families:
            found.append(families.pop(0))
    return [*found, *families]


def drawn_variants(unit: Unit) -> list[str]:
    """The plain compiler, and others by chance."""
    others = [name for name in VARIANTS if name != PLAIN]
    return [PLAIN, *random.Random(f"variants {unit}").sample(others, unit.benign - 1)]


class CompiledMeasuring(Measuring):
    """One unit, whose candidates are all compiled."""

    def run(self) -> list[Outcome]:
        """All cases of the unit."""
        outcomes = self._variants()
        for outcome, mutant in _seen(
            [self._planted(site) for site in _sites(self.unit, self.program)],
            self.unit.mutants,
        ):
            self._ask_compiled(outcome, mutant)
            outcomes.append(outcome)
        if len(self.program.calls) <= MOST_CALLS_LOCATED:
            outcomes += self._guarded()
        return outcomes

    def _variants(self) -> list[Outcome]:
        """The program as it is, compiled in several ways.

        Where the plain compiler gives eager's bits, it calls eager's kernels, and so do most of the
        others: then few are tried. No rule has a part in that.
        """
        outcomes: list[Outcome] = []
        for name in drawn_variants(self.unit):
            if len(outcomes) >= VARIANTS_OF_EQUAL_BITS and not any(one.bits for one in outcomes):
                break
            outcome = Outcome(unit=self.unit, kind=BENIGN, change=name, node="*")
            self._ask(outcome, compiled_variant(self.program.module, name))
            outcomes.append(outcome)
        return outcomes

    def run_candidate(self, changed: Any) -> list[Tensor]:
        """What compiled code gives, called as the judge will call it, so that it is made once."""
        torch.manual_seed(0)
        return list(changed(*self.program.fresh_inputs()))

    def _ask_compiled(self, outcome: Outcome, mutant: GraphModule) -> None:
        """The fault, written down as plain operators and compiled."""
        try:
            torch.manual_seed(0)
            flat = trace_calls(mutant, self.program.fresh_inputs())
        except Exception as error:  # noqa: BLE001  (kept with the case, which then is none)
            outcome.error = told(error)
            return
        self._ask(outcome, compiled_variant(flat, PLAIN))

    def _guarded(self) -> list[Outcome]:
        """The guard on the program as it is, and on what a faulty pass makes of it."""
        right = Outcome(unit=self.unit, kind=BENIGN, change=GUARDED, node="*")
        self._ask_guard(right, None)
        outcomes = [right]
        try:
            lowered = lowered_program(self.program)
            planting = _Lowered(self.unit, lowered)
        except Exception as error:  # noqa: BLE001  (kept, and counted among what was not tried)
            return [*outcomes, _not_made(self.unit, told(error))]
        for outcome, mutant in planting.faults():
            call = next(n.target for n in mutant.graph.nodes if n.name == outcome.node)
            verdict = self._ask_guard(outcome, FaultyPass(outcome.node, call))
            if verdict is not None and outcome.alarms[GUARD] is True:
                found = said_of(verdict, lowered, outcome.node)
                outcome.said, outcome.how, outcome.distance = found
            outcomes.append(outcome)
        return outcomes

    def _ask_guard(self, outcome: Outcome, fault: FaultyPass | None) -> Verdict | None:
        began = time.perf_counter()
        try:
            verdict = guarded_verdict(self.program, fault)
        except Exception as error:  # noqa: BLE001  (kept with the case, which then is none)
            outcome.error = told(error)
            return None
        outcome.seconds[GUARD] = round(time.perf_counter() - began, 5)
        if verdict.status is Status.UNVERIFIED:
            outcome.alarms[GUARD] = f"unverified: {verdict.failures[0].reason:.120}"
        else:
            outcome.alarms[GUARD] = not verdict.passed
        return verdict


class _Lowered:
    """Faults in the graph of a program that Inductor is given."""

    def __init__(self, unit: Unit, lowered: FlatProgram) -> None:
        self.unit = unit
        self.program = lowered
        self.noise = program_noise(lowered)

    def faults(self) -> list[tuple[Outcome, GraphModule]]:
        """As many as the unit takes faults, each of them more than faint."""
        # A graph that passes work on has no memory to share, and its dtypes are promised to others.
        drawn = [s for s in _sites(self.unit, self.program) if s.mutation not in NO_VALUES]
        planted = [self._planted(site) for site in drawn]
        return _seen(planted, max(1, self.unit.mutants - 1))

    def _planted(self, site: FaultSite) -> tuple[Outcome, GraphModule | None]:
        outcome = Outcome(
            unit=self.unit, kind=PLANTED, change=site.mutation, node=site.node, detail=site.detail
        )
        try:
            mutant = plant(self.program, site)
            if mutant is None:
                return outcome, None
            effect = measure_effect(self.program, mutant, self.noise)
        except Exception as error:  # noqa: BLE001  (kept with the case, which then is none)
            outcome.error = told(error)
            return outcome, None
        outcome.band = effect.band
        outcome.over_noise = min(effect.over_noise, 1e99)
        outcome.relative = min(effect.relative, 1e99)
        return outcome, mutant


def _sites(unit: Unit, program: FlatProgram) -> list[FaultSite]:
    return [s for s in drawn_mutants(unit, program) if s.mutation != COMPILED_AWAY]


def _seen(
    planted: list[tuple[Outcome, GraphModule | None]], count: int
) -> list[tuple[Outcome, GraphModule]]:
    """So many faults that are clear or moderate: a compile is too dear for a faint one."""
    told_apart = [pair for pair in planted if pair[0].band in {"clear", "moderate"}]
    return chosen(told_apart, count)


def _not_made(unit: Unit, why: str) -> Outcome:
    return Outcome(unit=unit, kind=PLANTED, change="", node="*", error=why)


def measured_compiled(unit: Unit) -> Entry:
    """One unit; a program that cannot be measured is told, not dropped."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Entry(unit, CompiledMeasuring(unit).run())
        except Exception as error:  # noqa: BLE001  (kept in the journal and counted)
            return Entry(unit, error=told(error))
        finally:
            torch.compiler.reset()


__all__ = ["GUARD", "GUARDED", "MUTANT", "PLANTED", "compiled_units", "measured_compiled"]
