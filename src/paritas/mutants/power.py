"""power(): which faults would the check have caught in this model, on these inputs?"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from paritas.core.call_options import takes_options
from paritas.core.errors import UsageError
from paritas.core.execution.fitting import check_by, describe_shortage
from paritas.core.execution.saved_state import RandomState
from paritas.core.execution.subjects import input_sets
from paritas.core.numerics.contents import leaves
from paritas.core.results.findings import Status
from paritas.core.results.progress import Progress, shows_progress
from paritas.core.results.wording import count_things, list_first
from paritas.core.time_limit import OutOfTime, TimeLimit
from paritas.core.torch_private.global_state import quietly
from paritas.mutants.planting import (
    MUTATIONS,
    judge_mutant,
    measure_effect,
    plant,
    program_noise,
    sites,
)
from paritas.mutants.programs import ModelInPieces, Piece, trace_program
from paritas.mutants.rewrites import rewritable, rewrite_call
from paritas.mutants.rows import FaultResult, Grade, PowerReport, Reordering
from paritas.mutants.scaling import SCALES, ScaledProgram, smallest_caught
from paritas.mutants.sites import Places, even_order, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from paritas.core.execution.subjects import Inputs
    from paritas.mutants.planting import Effect, FaultSite
    from paritas.mutants.programs import FlatProgram


# Faults are planted in the model's own graph, one at a time, and `verify` judges the wrong program
# like any other candidate. The exact effect of each is measured in float64 and compared with the
# program's own rounding noise, because a smaller fault cannot be distinguished from rounding.

REWRITES = 6
# A graded fault costs about a dozen verdicts, so there is only one for this many other faults.
PLACES = 10
FAULTS_A_PLACE = 20
# Below this delta, a result changes in proportion to it.
PROPORTIONAL = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerOptions:
    """Which faults `power` plants, how it judges them, and how long.

    Attributes:
        faults: the most faults to plant.
        seconds: the time limit; afterwards the results so far are reported.
        gradients: whether to include the backward pass, if anything requires grad.
        autocast: run the forward pass under `torch.autocast` to this dtype.
        by: "whole" to judge each fault on the whole model, or "blocks" to judge it on its block, as
            `verify(by="blocks")` does, in the memory of a few blocks. By default the whole, and
            blocks where there is not enough memory for it; a note says so.
        blocks: names or globs of the blocks, such as `layers.*`; by default, the repeated modules.
            With them, `by` is "blocks".
        seed: for choosing faults.
        on_progress: called with a description before each step.
    """

    faults: int = 200
    seconds: float = 60.0
    gradients: bool = True
    autocast: torch.dtype | None = None
    by: Literal["whole", "blocks"] | None = None
    blocks: Sequence[str] | None = None
    seed: int = 0
    on_progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.faults < 1 or not self.seconds > 0:
            raise UsageError(
                f"faults and seconds must be above 0, got faults={self.faults!r}, "
                f"seconds={self.seconds!r}"
            )


@shows_progress
@takes_options(PowerOptions)
def power(inputs: Any, model: Callable[..., Any], options: PowerOptions) -> PowerReport:
    """Plant faults in a model, and see which of them `verify` catches.

    Args:
        inputs: a list or tuple of positional inputs, or `Inputs(args, kwargs)`.
        model: an `nn.Module`, or any function of tensors; it is not changed.
        options: given as keyword arguments; see `PowerOptions`.

    Returns:
        The report. Ctrl-C ends the search, and the report has the results so far.

    Raises:
        UsageError: the model cannot be traced, or there are no inputs.
    """
    gradients, autocast, seed = options.gradients, options.autocast, options.seed
    check_by(options.by, options.blocks)
    asks_blocks = options.by == "blocks" or options.blocks is not None
    shortage = "" if options.by or asks_blocks else describe_shortage(model, gradients=gradients)[0]
    first_inputs, *others = input_sets(inputs)
    tell = options.on_progress or (lambda _: None)
    plan = _Plan(options.faults, seed, TimeLimit(options.seconds), tell)
    rng = RandomState.now()
    try:
        torch.manual_seed(seed)
        if asks_blocks or shortage:
            plan.show("running the model")
            cut = ModelInPieces(
                model,
                first_inputs,
                options.blocks,
                gradients=gradients,
                autocast=autocast,
                seed=seed,
            )
            report = _search_blocks(cut, plan)
        else:
            report = _search_piece(Piece(model, first_inputs, gradients, autocast), plan)
    finally:
        rng.restore()
    notes = list(report.notes)
    if shortage:
        notes.insert(0, f"by blocks because of memory: {shortage}")
    if others:
        notes.append(f"only the first of {len(others) + 1} sets of inputs was used")
    return msgspec.structs.replace(report, notes=tuple(notes), seconds=plan.limit.spent)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to do, and in which time.

    Attributes:
        faults: the most faults to plant.
        places: the most places of graded faults; None to choose.
        rewrites: the most harmless rewrites.
    """

    faults: int
    seed: int
    limit: TimeLimit
    show: Callable[[str], None]
    places: int | None = None
    rewrites: int = REWRITES

    def share(self, pieces_left: int, done: PowerReport, number: int) -> _Plan:
        """The plan of one of `pieces_left` more pieces: an equal share of what is still to do."""

        def part(planned_count: int, done_count: int) -> int:
            return max(0, math.ceil((planned_count - done_count) / pieces_left))

        return dataclasses.replace(
            self,
            faults=part(self.faults, done.planned),
            places=part(_graded_places(self.faults), done.planned_grades),
            rewrites=part(REWRITES, len(done.reorderings)),
            # Another seed: few faults of the same kinds in every block would be all there is.
            seed=self.seed + 1009 * number,
            limit=TimeLimit(max(0.0, self.limit.left) / pieces_left),
        )


def _graded_places(faults: int) -> int:
    return max(2, min(PLACES, faults // FAULTS_A_PLACE))


def _search_piece(piece: Piece, plan: _Plan) -> PowerReport:
    """Trace one piece, and plant faults in it."""
    plan.show(f"tracing {piece.block or 'the model'}")
    program = trace_program(
        _call_positionally(piece.model, piece.inputs),
        [*piece.inputs.args, *piece.inputs.kwargs.values()],
        gradients=piece.gradients,
        autocast=piece.autocast,
        seed=plan.seed,
        upstream=piece.upstream,
    )
    places = Places(program, piece.model, piece.prefix)
    search = _PowerSearch(program, places, plan, piece.block)
    search.run()
    return search.report()


def _search_blocks(cut: ModelInPieces, plan: _Plan) -> PowerReport:
    """Plant faults in one piece after the other; each gets its share of faults and time."""
    done = PowerReport(seed=plan.seed, notes=tuple(cut.notes))
    untraced: list[str] = []
    order = even_order(len(cut.names), 0.5)
    for number, piece_index in enumerate(order):
        name = cut.names[piece_index]
        share = plan.share(len(order) - number, done, number)
        if not share.faults:
            break
        if not share.limit.seconds or done.stopped == "interrupt":
            names = [cut.names[unreached_index] for unreached_index in order[number:]]
            why = "interrupted" if done.stopped == "interrupt" else "the time ran out"
            text = (
                f"{count_things(len(names), 'piece')} not reached: {why} ({list_first(names, 3)})"
            )
            stopped = done.stopped or "time"
            done = msgspec.structs.replace(
                done, notes=(*done.notes, text), stopped=stopped, planned=plan.faults
            )
            break
        try:
            with cut.piece(name) as piece:
                search_piece = _search_piece(piece, share)
        except UsageError as error:
            untraced.append(f"{name}: {error}"[:160])
            continue
        done = _join_reports(done, search_piece)
        gc.collect()  # graphs refer to themselves, and hold the tensors of the piece
    if untraced and not done.operators:
        raise UsageError(f"no block can be traced: {untraced[0]}")
    return msgspec.structs.replace(done, notes=(*done.notes, *untraced))


def _join_reports(power_report: PowerReport, two: PowerReport) -> PowerReport:
    """The results of two pieces as one report."""
    both = (power_report, two)
    stops = {report.stopped for report in both}
    return msgspec.structs.replace(
        power_report,
        dtypes=tuple(dict.fromkeys((*power_report.dtypes, *two.dtypes))),
        operators=power_report.operators + two.operators,
        backward=power_report.backward + two.backward,
        results=power_report.results + two.results,
        sites=power_report.sites + two.sites,
        planned=power_report.planned + two.planned,
        faults=(*power_report.faults, *two.faults),
        grades=(*power_report.grades, *two.grades),
        planned_grades=power_report.planned_grades + two.planned_grades,
        reorderings=(*power_report.reorderings, *two.reorderings),
        stopped="interrupt" if "interrupt" in stops else "time" if "time" in stops else "",
        notes=tuple(dict.fromkeys((*power_report.notes, *two.notes))),
    )


def _call_positionally(model: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
    """The model, with the values of its keyword arguments passed after the others."""
    if not inputs.kwargs:
        return model
    many = len(inputs.args)

    def call(*values: Any) -> Any:
        return plain(*values[:many], **dict(zip(inputs.kwargs, values[many:], strict=True)))

    plain = model
    if isinstance(model, nn.Module):
        # Another object with the same parameters under the same names.
        plain, model = model.forward, copy.copy(model)
        model.forward = call
        return model
    return call


def _untraced_work(program: FlatProgram) -> list[str]:
    """Notes about work of the model that is not in its graph."""
    constant_count = len(program.module.graph.find_nodes(op="get_attr"))
    read = sum(str(node.target).startswith("aten._local_scalar_dense") for node in program.calls)
    notes = []
    if constant_count:
        tensors = count_things(constant_count, "tensor")
        notes.append(f"traced as constants: {tensors} that Python or numpy code creates")
    if read:
        notes.append(f"traced as constants: {count_things(read, 'value')} that Python code reads")
    return notes


@dataclasses.dataclass
class _PowerSearch:
    """One program, and the faults planted in it so far."""

    program: FlatProgram
    places: Places
    plan: _Plan
    block: str = ""
    faults: list[FaultResult] = dataclasses.field(default_factory=list)
    grades: list[Grade] = dataclasses.field(default_factory=list)
    reorderings: list[Reordering] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    stopped: Literal["", "time", "interrupt"] = ""

    def __post_init__(self) -> None:
        self.many, self.seed, self.show = self.plan.faults, self.plan.seed, self.plan.show
        self.stage = f"planting faults in {self.block}" if self.block else "planting faults"
        fault_sites = sites(self.program)
        self.sites = turns(fault_sites, lambda site: site.mutation, self.seed)
        scalable = self.places.scalable()
        places = self.plan.places
        places = _graded_places(self.many) if places is None else places
        order = even_order(len(scalable), 0.5)[:places]
        self.scalable = [scalable[node_index] for node_index in order]

    @quietly()
    def run(self) -> None:
        """Plant faults until all are done, the time is over, or the user stops it."""
        self.notes += _untraced_work(self.program)
        if not self.sites and not self.scalable:
            what = self.block or "the model"
            self.notes.append(f"{what} computes no values, so there is no place for a fault")
            return
        try:
            self.show("measuring the model's own noise")
            self.noise = program_noise(self.program, self.seed)
            self._rewrite()
            self._plant()
        except OutOfTime:
            self.stopped = "time"
        except KeyboardInterrupt:
            self.stopped = "interrupt"

    def report(self) -> PowerReport:
        """The results so far."""
        tensors = [leaf for _, leaf in leaves(self.program.inputs) if isinstance(leaf, Tensor)]
        tensors += [node.meta["val"] for node in self.program.calls if "val" in node.meta]
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        return PowerReport(
            dtypes=tuple(name for name, _ in sizes.most_common()),
            operators=len(self.program.calls),
            backward=len(self.program.backward),
            results=len(self.program.results),
            sites=len(self.sites),
            planned=self._count_planned_sites(),
            faults=tuple(self.faults),
            grades=tuple(self.grades),
            planned_grades=len(self.scalable),
            reorderings=tuple(self.reorderings),
            seed=self.seed,
            stopped=self.stopped,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _rewrite(self) -> None:
        names = rewritable(self.program)
        many = min(self.plan.rewrites, len(names))
        for name in turns(names, self.places.operator, self.seed)[:many]:
            self._step("trying harmless rewrites", len(self.reorderings), many)
            words, module = rewrite_call(self.program, name)
            status = self._judge(module, lift=True)
            self.reorderings.append(
                Reordering(rewrite=words, node=name, block=self.block, status=status)
            )

    def _plant(self) -> None:
        """Plant faults, with graded ones in between so that both get their share of the time."""
        waiting = list(self.scalable)
        every = max(1, self._count_planned_sites() // max(1, len(waiting)))
        done = 0
        for site in self.sites:
            if done == self.many:
                break
            if done % every == 0 and waiting:
                self._grade(waiting.pop(0))
            self._step(self.stage, len(self.faults), self._count_planned_sites())
            mutant = plant(self.program, site)
            effect = None if mutant is None else self._effect(mutant)
            if mutant is not None and effect is not None:  # otherwise it does not apply
                self.faults.append(self._try(site, mutant, effect))
                done += 1
        for name in waiting:
            self._grade(name)

    def _try(self, site: FaultSite, mutant: GraphModule, effect: Effect) -> FaultResult:
        status: Status | None = None
        native: Status | None = None
        if effect.band != "none":
            status = self._judge(mutant, lift=True)
            native = self._judge(mutant, lift=False)
        return FaultResult(
            mutation=site.mutation,
            text=MUTATIONS[site.mutation].text,
            node=site.node,
            operator=self.places.operator(site.node),
            near=self.places.near(site.node),
            block=self.block,
            backward=site.node in self.program.backward,
            detail=site.detail,
            relative=effect.relative,
            over_noise=effect.over_noise,
            band=effect.band,
            status=status,
            native=native,
            reason=self._reason(site, effect, status),
            is_dead=effect.band == "none" and self.places.is_dead(site.node),
        )

    def _reason(self, site: FaultSite, effect: Effect, status: Status | None) -> str:
        if effect.band == "none":
            if self.places.is_dead(site.node):
                return "no result depends on it"
            return "it changes no result on these inputs"
        if status is None or status.is_wrong:
            return ""
        if status is Status.UNVERIFIED:
            return "the check could not compare it"
        if status is Status.UNSTABLE:
            return "the model's own rounding decides the results that it changes"
        if effect.band == "faint":
            return "its effect is smaller than the model's own rounding"
        return "its effect is within the rounding that is allowed for this model"

    def _grade(self, name: str) -> None:
        self._step(self.stage, len(self.faults), self._count_planned_sites())
        program = ScaledProgram(self.program, name)
        base = self._effect(program.scale_call(PROPORTIONAL))
        if base is None or base.band == "none" or not math.isfinite(base.relative):
            return  # for example, a later norm cancels the scale
        changes: list[float | None] = []
        tried, floor = 0, SCALES[-1]
        for lift in (True, False):

            def is_caught(delta: float, lift: bool = lift) -> bool:  # noqa: FBT001
                self._step(self.stage, len(self.faults), self._count_planned_sites())
                return self._judge(program.scale_call(delta), lift=lift).is_wrong

            delta, steps = smallest_caught(is_caught, floor)
            tried += steps
            changes.append(None if delta is None else self._change(program, delta, base))
            floor = delta or floor  # the native run alone never catches more
        self.grades.append(
            Grade(
                node=name,
                operator=self.places.operator(name),
                near=self.places.near(name),
                block=self.block,
                backward=name in self.program.backward,
                lifted=changes[0],
                native=changes[1],
                tried=tried,
            )
        )

    def _change(self, program: ScaledProgram, delta: float, base: Effect) -> float:
        """The relative change of a result; for a small delta, extrapolated from a larger one."""
        if delta <= PROPORTIONAL:
            return base.relative * delta / PROPORTIONAL
        return measure_effect(self.program, program.scale_call(delta), self.noise).relative

    def _effect(self, mutant: GraphModule) -> Effect | None:
        """None if it cannot be measured: then there is nothing to compare a verdict with."""
        try:
            return measure_effect(self.program, mutant, self.noise)
        except UsageError as error:
            self.notes.append(f"a fault was left out: {error}"[:160])
            return None

    def _judge(self, mutant: GraphModule, *, lift: bool) -> Status:
        verdict = judge_mutant(mutant, self.noise, lift=lift)
        if lift:
            weaker = self.noise.evidence.notes.weaker
            self.notes += [note for note in verdict.notes if note in weaker]
        return verdict.status

    def _count_planned_sites(self) -> int:
        return min(self.many, len(self.sites))

    def _step(self, stage: str, done: int, total: int) -> None:
        """Report progress, and stop if the time is over."""
        self.plan.limit.require()
        self.show(Progress(stage, done, total, at_most=self.plan.limit.left))
