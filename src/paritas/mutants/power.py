"""power(): what would the check have caught in this model, on these inputs?

Faults are planted in the model's own graph, one at a time, and the wrong program is judged by
`verify` like any other candidate. The exact effect of each is measured in float64 and set against
the program's own rounding noise, since nothing can tell a fault below it from rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from paritas._torch.quiet import quietly
from paritas.checking.config import input_sets
from paritas.errors import UsageError
from paritas.mutants.effects import measure_effect, program_noise
from paritas.mutants.judging import judge_mutant
from paritas.mutants.kinds import MUTATIONS
from paritas.mutants.planting import plant, sites
from paritas.mutants.power_grading import SCALES, ScaledProgram, smallest_caught
from paritas.mutants.power_places import Places, even_order, turns
from paritas.mutants.power_rewrites import rewritable, rewrite_call
from paritas.mutants.programs import trace_program
from paritas.numerics.findings import Status
from paritas.numerics.power_reports import CAUGHT, Fault, Grade, PowerReport, Reordering
from paritas.numerics.trees import leaves
from paritas.recording.isolation import RandomState
from paritas.reporting.progress import Progress, shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from paritas.checking.config import Inputs
    from paritas.mutants.effects import Effect
    from paritas.mutants.planting import Site
    from paritas.mutants.programs import Program

__all__ = ["power"]

REWRITES = 6
# Graded faults are dear, about a dozen verdicts a place: one place for so many other faults.
PLACES = 10
FAULTS_A_PLACE = 20
# Notes of a verdict that was reached with less than the usual evidence.
WEAKER = ("only the native run", "no arbiter", "the lifted run is judged", "the program runs in")
# Below this delta a result changes in proportion to it.
PROPORTIONAL = 1e-4


@shows_progress
def power(  # noqa: PLR0913  (each is a separate wish of the caller)
    inputs: Any,
    model: Callable[..., Any],
    *,
    faults: int = 200,
    seconds: float = 60.0,
    gradients: bool = True,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> PowerReport:
    """Plant faults in a model, and see which of them `verify` catches.

    Args:
        inputs: a list or tuple of positional inputs, or `Inputs(args, kwargs)`.
        model: an `nn.Module`, or any function of tensors; it is left as it is.
        faults: how many to plant at most.
        seconds: when they are over, what was found so far is reported.
        gradients: whether the backward pass is part of it, where anything requires grad.
        autocast: run the forward pass under `torch.autocast` to this dtype.
        seed: of the draw of faults.
        on_progress: called with a few words before each step.

    Returns:
        The report. Ctrl-C ends the search, and what was found so far is in it.

    Raises:
        UsageError: the model cannot be traced, or there is nothing to call it with.
    """
    if faults < 1 or not seconds > 0:
        message = f"faults and seconds must be above 0, not faults={faults!r}, seconds={seconds!r}"
        raise UsageError(message)
    tell = on_progress or (lambda _: None)
    began = time.monotonic()
    given, *others = input_sets(inputs)
    rng = RandomState.now()
    try:
        torch.manual_seed(seed)
        tell("tracing the model")
        program = trace_program(
            _positional(model, given),
            [*given.args, *given.kwargs.values()],
            gradients=gradients,
            autocast=autocast,
            seed=seed,
        )
        search = _Search(program, Places(program, model), faults, seed, tell)
        search.run(began + seconds)
    finally:
        rng.restore()
    if others:
        search.notes.append(f"of {len(others) + 1} sets of inputs, the first alone was used")
    return search.report(time.monotonic() - began)


def _positional(model: Callable[..., Any], given: Inputs) -> Callable[..., Any]:
    """The model, called with the values of its keyword arguments behind the others."""
    if not given.kwargs:
        return model
    many = len(given.args)

    def call(*values: Any) -> Any:
        return plain(*values[:many], **dict(zip(given.kwargs, values[many:], strict=True)))

    plain = model
    if isinstance(model, nn.Module):
        # Another object with the same parameters under the same names.
        plain, model = model.forward, copy.copy(model)
        model.forward = call
        return model
    return call


def _frozen(program: Program) -> list[str]:
    """What of the model's work is not in its graph, since it left torch on the way."""
    made = len(program.module.graph.find_nodes(op="get_attr"))
    read = sum(str(node.target).startswith("aten._local_scalar_dense") for node in program.calls)
    notes = []
    if made:
        where = "in Python or numpy"
        notes.append(
            f"tensors that the model makes of numbers, {where}, are constants here: {made}"
        )
    if read:
        notes.append(f"values that Python code reads, and decides by, are constants here: {read}")
    return notes


class _OutOfTimeError(Exception):
    """The seconds are over."""


@dataclasses.dataclass
class _Search:
    """One program, and what was planted in it so far."""

    program: Program
    places: Places
    many: int
    seed: int
    tell: Callable[[str], None]
    faults: list[Fault] = dataclasses.field(default_factory=list)
    grades: list[Grade] = dataclasses.field(default_factory=list)
    reorderings: list[Reordering] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    stopped: Literal["", "time", "interrupt"] = ""
    deadline: float = math.inf

    def __post_init__(self) -> None:
        found = sites(self.program)
        self.sites = turns(found, lambda site: site.mutation, self.seed)
        scalable = self.places.scalable()
        places = max(2, min(PLACES, self.many // FAULTS_A_PLACE))
        order = even_order(len(scalable), 0.5)[:places]
        self.scalable = [scalable[place] for place in order]

    @quietly()
    def run(self, deadline: float) -> None:
        """Plant until there is nothing left, the time is over, or somebody stops it."""
        self.deadline = deadline
        self.notes += _frozen(self.program)
        if not self.sites and not self.scalable:
            self.notes.append("there is nothing to plant a fault in: the model computes no values")
            return
        try:
            self.tell("measuring the model's own noise")
            self.noise = program_noise(self.program, self.seed)
            self._rewrite()
            self._plant()
        except _OutOfTimeError:
            self.stopped = "time"
        except KeyboardInterrupt:
            self.stopped = "interrupt"

    def report(self, seconds: float) -> PowerReport:
        """What was found."""
        tensors = [leaf for _, leaf in leaves(self.program.inputs) if isinstance(leaf, Tensor)]
        tensors += [node.meta["val"] for node in self.program.calls if "val" in node.meta]
        sizes: dict[str, int] = {}
        for one in tensors:
            if isinstance(one, Tensor) and one.is_floating_point():
                name = str(one.dtype).removeprefix("torch.")
                sizes[name] = sizes.get(name, 0) + one.numel()
        return PowerReport(
            dtypes=tuple(sorted(sizes, key=lambda name: -sizes[name])),
            operators=len(self.program.calls),
            backward=len(self.program.backward),
            results=len(self.program.results),
            sites=len(self.sites),
            planned=self._planned(),
            faults=tuple(self.faults),
            grades=tuple(self.grades),
            planned_grades=len(self.scalable),
            reorderings=tuple(self.reorderings),
            seed=self.seed,
            seconds=seconds,
            stopped=self.stopped,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _rewrite(self) -> None:
        names = rewritable(self.program)
        for name in turns(names, self.places.operator, self.seed)[:REWRITES]:
            self._step("trying harmless rewrites", len(self.reorderings), min(REWRITES, len(names)))
            words, module = rewrite_call(self.program, name)
            status = self._judge(module, lift=True)
            self.reorderings.append(Reordering(rewrite=words, node=name, status=status))

    def _plant(self) -> None:
        """Faults, and now and then a place for graded ones, so that both have their share."""
        waiting = list(self.scalable)
        every = max(1, self._planned() // max(1, len(waiting)))
        done = 0
        for site in self.sites:
            if done == self.many:
                break
            if done % every == 0 and waiting:
                self._grade(waiting.pop(0))
            self._step("planting faults", len(self.faults), self._planned())
            mutant = plant(self.program, site)
            effect = None if mutant is None else self._effect(mutant)
            if mutant is not None and effect is not None:  # otherwise it turned out not to apply
                self.faults.append(self._try(site, mutant, effect))
                done += 1
        for name in waiting:
            self._grade(name)

    def _try(self, site: Site, mutant: GraphModule, effect: Effect) -> Fault:
        status: Status | None = None
        native: Status | None = None
        if effect.band != "none":
            status = self._judge(mutant, lift=True)
            native = self._judge(mutant, lift=False)
        return Fault(
            mutation=site.mutation,
            text=MUTATIONS[site.mutation].text,
            node=site.node,
            operator=self.places.operator(site.node),
            near=self.places.near(site.node),
            backward=site.node in self.program.backward,
            detail=site.detail,
            relative=effect.relative,
            over_noise=effect.over_noise,
            band=effect.band,
            status=status,
            native=native,
            reason=self._reason(site, effect, status),
        )

    def _reason(self, site: Site, effect: Effect, status: Status | None) -> str:
        if effect.band == "none":
            if self.places.is_dead(site.node):
                return "no result depends on it"
            return "it changes no result on these inputs"
        if status is None or status in CAUGHT:
            return ""
        if status is Status.UNVERIFIED:
            return "the check could not compare it"
        if status is Status.UNSTABLE:
            return "the model's own rounding decides the results that it changes"
        if effect.band == "faint":
            return "it changes less than the model's own rounding does"
        return "it is within what rounding of this model may do"

    def _grade(self, name: str) -> None:
        self._step("planting faults", len(self.faults), self._planned())
        program = ScaledProgram(self.program, name)
        base = self._effect(program.scaled(PROPORTIONAL))
        if base is None or base.band == "none" or not math.isfinite(base.relative):
            return  # a norm behind it takes the scale out again
        changes: list[float | None] = []
        tried, floor = 0, SCALES[-1]
        for lift in (True, False):

            def is_caught(delta: float, lift: bool = lift) -> bool:  # noqa: FBT001
                self._step("planting faults", len(self.faults), self._planned())
                return self._judge(program.scaled(delta), lift=lift) in CAUGHT

            delta, steps = smallest_caught(is_caught, floor)
            tried += steps
            changes.append(None if delta is None else self._change(program, delta, base))
            floor = delta or floor  # less is seen without the lifted run, not more
        self.grades.append(
            Grade(
                node=name,
                operator=self.places.operator(name),
                near=self.places.near(name),
                backward=name in self.program.backward,
                lifted=changes[0],
                native=changes[1],
                tried=tried,
            )
        )

    def _change(self, program: ScaledProgram, delta: float, base: Effect) -> float:
        """The relative change of a result; of a small delta, in proportion to that of a larger."""
        if delta <= PROPORTIONAL:
            return base.relative * delta / PROPORTIONAL
        return measure_effect(self.program, program.scaled(delta), self.noise).relative

    def _effect(self, mutant: GraphModule) -> Effect | None:
        """None where it cannot be known, which leaves nothing to measure a verdict by."""
        try:
            return measure_effect(self.program, mutant, self.noise)
        except UsageError as error:
            self.notes.append(f"a fault was left out: {error}"[:160])
            return None

    def _judge(self, mutant: GraphModule, *, lift: bool) -> Status:
        verdict = judge_mutant(mutant, self.noise, lift=lift)
        if lift:
            self.notes += [note for note in verdict.notes if note.startswith(WEAKER)]
        return verdict.status

    def _planned(self) -> int:
        return min(self.many, len(self.sites))

    def _step(self, stage: str, done: int, total: int) -> None:
        """Before everything that takes long."""
        left = self.deadline - time.monotonic()
        if left < 0:
            raise _OutOfTimeError
        self.tell(Progress(stage, done, total, at_most=left))
