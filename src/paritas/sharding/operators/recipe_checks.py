"""Check one way to split an operator: forward, backward, and what the operator writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed

from paritas.core.errors import UsageError, first_line, in_one_line
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.item_evidence import GivenLift, ItemEvidence
from paritas.core.execution.observation import Observation, RunOptions
from paritas.core.execution.program import Program, count_dtypes
from paritas.core.judging.failures import (
    Explainer,
    FailedSplit,
    call_context,
    likely_mixups,
    remember_failed,
)
from paritas.core.judging.pairs import Pair, Ruling, explain_pair, judge_pair, settle_pair
from paritas.core.numerics import criterion
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.gates import (
    GROSS_SHAKES,
    gross_difference,
    near_in_float64,
    near_natively,
)
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.placement.placement import (
    Group,
    RankCut,
    RankError,
    Recipe,
    argument_words,
    bounds,
    device_of,
    name_of,
)
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Status,
    Verdict,
    mismatch,
    unverified,
)
from paritas.core.results.items import (
    GRADIENTS,
    Item,
    ItemKind,
    Replicate,
    Shard,
    after_call,
    gradient,
    output,
)
from paritas.core.results.rank_backends import RANK_BACKENDS
from paritas.sharding.operators.ranks.remote_runs import RemoteRunner
from paritas.sharding.operators.runner import Draws, Runner, Streams
from paritas.sharding.plans.rank_pool import LostRankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.diagnosis.case import Context
    from paritas.core.operators.calls import OperatorCall
    from paritas.core.results.rank_backends import BackendName
    from paritas.sharding.operators.annotation import Annotation
    from paritas.sharding.operators.ranks.remote_runs import Team
    from paritas.sharding.operators.runner import OperatorRun

# The recipe and the number of ranks of each axis of a mesh.
Levels = tuple[tuple[Recipe, int], ...]


# --- What is remembered of a failing split, so that it can be shrunk ------------------------------


def failed_split(
    verdict: Verdict,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int,
    annotation: Annotation | None = None,
) -> tuple[FailedSplit, ...]:
    """What to remember of a split; empty unless it is certainly wrong.

    Args:
        verdict: of this split alone.
        annotation: the source of the recipe; it gives other recipes for other shapes.
    """
    wrong = _wrong(verdict)
    if not wrong:
        return ()
    failed = FailedSplit(
        call=call,
        recipe=recipe[0] if isinstance(recipe, tuple) and len(recipe) == 1 else recipe,
        annotation=None if annotation is None else annotation.text,
        ranks=ranks[0] if isinstance(ranks, tuple) and len(ranks) == 1 else ranks,
        seed=seed,
        status=max((finding.status for finding in wrong), key=lambda status: status.gravity),
        kinds=kinds_of(verdict),
    )
    return (failed,)


def kinds_of(verdict: Verdict) -> frozenset[tuple[Aspect, str]]:
    """The kinds of failures; the same kinds on other shapes are the same fault."""
    roles = {ItemKind.GRADIENT: "gradient", ItemKind.INPUT_AFTER_CALL: "argument"}
    return frozenset(
        (finding.aspect, roles.get(finding.item.kind, "result")) for finding in _wrong(verdict)
    )


def _wrong(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.failures if finding.status.is_wrong]


# --- Judging with measured noise ------------------------------------------------------------------

# How many findings of one recipe are diagnosed: where a result is wrong, its gradients are too.
MOST_EXPLAINED = 4


def run_items(run: OperatorRun) -> dict[Item, Any]:
    """Everything that is compared of a run; a missing gradient is None."""
    items = dict(run.results)
    for turn, gradients in enumerate(run.gradients):
        for item, value in gradients.items():
            items[msgspec.structs.replace(item, draw=turn + 1)] = value
    return items


def shown_item(key: Item) -> Item:
    """The item as it is reported: without the number of the cotangent."""
    return msgspec.structs.replace(key, draw=0)


@dataclasses.dataclass(frozen=True, eq=False)
class SideProgram(Program):
    """One side of a check: the whole operator, or if `split` is set, the ranks."""

    sets_default = True
    notes_float64 = False

    runner: Runner
    split: bool

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """The dtypes of its results and gradients."""
        return count_dtypes(native[0].outputs.values())

    def run(self, options: RunOptions) -> list[Observation]:
        """Run this side again."""
        run = self.runner.split if self.split else self.runner.whole
        run_record = run(wide=options.wide, around=options.around())
        return [
            Observation(
                outputs=run_items(run_record),
                error=run_record.error,
                gradient_error=run_record.gradient_error,
            )
        ]

    def baseline(self, evidence: Evidence[Any]) -> list[Observation] | None:
        """For ranks, the float64 run: narrowing on a rank does not count as noise."""
        if not self.split or evidence.is_narrow:
            return None
        return evidence.run(RunOptions(wide=True, mode=evidence.lift_mode()))


class NoiseJudge:
    """Judges the items that no gate settles; makes further runs only when they are needed."""

    def __init__(self, runner: Runner, lifted: tuple[OperatorRun, OperatorRun]) -> None:
        """`lifted` are the plain float64 runs of both sides."""
        self.runner = runner
        self.lifted = tuple(run_items(run) for run in lifted)
        self._shaken: dict[Item, Any] | None = None
        self._explainer = Explainer(left=MOST_EXPLAINED)

    @functools.cached_property
    def runs(self) -> tuple[Evidence[SideProgram], Evidence[SideProgram]]:
        """The evidence of both sides."""
        return self._evidence(split=False), self._evidence(split=True)

    def _evidence(self, *, split: bool) -> Evidence[SideProgram]:
        program = SideProgram(self.runner, split=split)
        native = self.runner.split(wide=False) if split else self.runner.whole(wide=False)
        return Evidence(program, [Observation(outputs=run_items(native))], self.runner.seed)

    def _item(self, key: Item, *, in_float64: bool = False) -> ItemEvidence:
        """The evidence about one item, which includes the rounding of the ranks.

        A sum over ranks rounds every term. Where terms are larger than their sum, so is this
        noise, and any such split has it.
        """
        whole_side, ranks = self.runs
        lifted = GivenLift(ranks.arbiter)
        return ItemEvidence(whole_side, key, lifted=lifted, also=(ranks,), in_float64=in_float64)

    @property
    def notes(self) -> list[str]:
        """Notes about the runs."""
        notes = list(self._explainer.notes)
        if "runs" in vars(self):
            notes += [*self.runs[0].notes, *self.runs[1].notes]
        return notes

    def judge(self, key: Item) -> list[Finding]:
        """The findings about one item: from the lifted runs or, if these pass, the native ones."""
        whole_value, split, reason = _fill_missing_gradient(
            *(items.get(key) for items in self.lifted)
        )
        is_near = near_in_float64(whole_value, split)
        findings = [] if is_near else self._judge_lifted(key, whole_value, split)
        if is_near or (self.runner.narrow and all(f.status.passes() for f in findings)):
            natives = (side.native[0].outputs.get(key) for side in self.runs)
            first, second, _ = _fill_missing_gradient(*natives)
            describe = functools.partial(self._context, key, first)
            pair = Pair(shown_item(key), first, second, self._item(key), describe)
            findings, _ = judge_pair(pair, explainer=self._explainer)
        return [_with_rank_of_worst(finding, reason, self.runner) for finding in findings]

    def _context(self, key: Item, whole_value: Any) -> Context:
        """The context for a diagnosis: a missing reduction, a part in the wrong place ..."""
        call = self.runner.call
        context = call_context(call.name, call.args, call.kwargs)
        names = {name_of(position): value for position, value in enumerate(call.args)}
        names |= {name_of(keyword): value for keyword, value in call.kwargs.items()}
        return dataclasses.replace(
            type(context)() if key.kind.is_gradient else context,
            world={f"axis {axis}": ranks for axis, (_, ranks) in enumerate(self.runner.levels)},
            named=likely_mixups(names, whole_value),
        )

    def _judge_lifted(self, key: Item, whole_value: Any, split: Any) -> list[Finding]:
        # The plain runs show the kind of fault; those that are judged are widened inside.
        describe = functools.partial(self._context, key, whole_value)
        plain = Pair(shown_item(key), whole_value, split, context=describe)
        ruling = self._rule_on_gross_difference(key, whole_value, split)
        if ruling is not None:
            return explain_pair([settle_pair(plain, ruling)], plain, self._explainer)
        left, right = self.runs
        # These lifted runs also widen what the operator narrows inside.
        first = (left.arbiter() or left.native)[0].outputs.get(key)
        second = (right.arbiter() or right.native)[0].outputs.get(key)
        first, second, _ = _fill_missing_gradient(first, second)
        evidence = self._item(key, in_float64=True)
        findings, _ = judge_pair(Pair(shown_item(key), first, second, evidence))
        findings = [_mark_float64(finding) for finding in findings]
        return explain_pair(findings, plain, self._explainer)

    def _rule_on_gross_difference(self, key: Item, whole_value: Any, split: Any) -> Ruling | None:
        """A difference too large for any rounding; None if that is not obvious."""
        if not is_inexact(whole_value) or not is_inexact(split) or whole_value.shape != split.shape:
            return None
        moved = self._shaken_item(key, whole_value)
        if moved is None or not bool(
            torch.isfinite(moved).all() & torch.isfinite(whole_value).all()
        ):
            return None
        lost = int((~torch.isfinite(split)).sum())
        limit = GROSS_SHAKES * criterion.rms_difference(moved, whole_value)
        reason = gross_difference(whole_value, split, lambda: limit)
        if lost:
            reason = f"{lost} of {whole_value.numel()} values are not finite, also in float64"
        if reason is None:
            return None
        return Ruling(Status.DIFFERENT, reason, {"metrics": pair_metrics(whole_value, split)})

    def _shaken_item(self, key: Item, like: Tensor) -> Tensor | None:
        if self._shaken is None:
            self._shaken = run_items(self.runner.whole(wide=True, shake=True))
        moved: Any = self._shaken.get(key)
        return moved if is_inexact(moved) and moved.shape == like.shape else None


def _fill_missing_gradient(whole_value: Any, split: Any) -> tuple[Any, Any, str]:
    """Replace a missing gradient by zeros; if the other side has one, say so in the reason."""
    if split is None and isinstance(whole_value, torch.Tensor):
        return whole_value, torch.zeros_like(whole_value), "no gradient arrives: "
    if whole_value is None and isinstance(split, torch.Tensor):
        return torch.zeros_like(split), split, "the whole operator has no gradient: "
    return whole_value, split, ""


def _mark_float64(finding: Finding) -> Finding:
    if finding.native is None:
        return finding
    reason = f"in float64, {finding.reason}" if finding.reason else ""
    return msgspec.structs.replace(finding, reason=reason, lifted=finding.native, native=None)


def _with_rank_of_worst(finding: Finding, reason: str, runner: Runner) -> Finding:
    """Add the rank that holds the worst element."""
    if finding.status.passes(strict=True):
        return finding
    words = f"{reason}{finding.reason}"
    worst = finding.metrics.max_abs_index if finding.metrics else None
    if worst and finding.aspect is Aspect.VALUE:
        cut = _cut_of(finding.item, runner)
        where = cut.words(worst) if cut and cut.dim < len(worst) else ""
        words = f"{words}; worst {where}" if where else words
    return msgspec.structs.replace(finding, reason=words)


def _cut_of(item: Item, runner: Runner) -> RankCut | None:
    if item in runner.cuts:
        return runner.cuts[item]
    recipe, ranks = runner.levels[0]
    values: dict[Any, Any] = {**dict(enumerate(runner.call.args)), **runner.call.kwargs}
    for argument_place, placement in recipe.inputs:
        if item == gradient(name_of(argument_place)) and isinstance(placement, Shard):
            value = values[argument_place]
            dim = placement.dim % value.dim()
            cuts = bounds(value.shape[dim], placement.unit, ranks, item.text)
            return RankCut(dim, tuple(cuts))
    return None


# --- The check ------------------------------------------------------------------------------------

# The note about an operator that draws random numbers.
DRAWS = "the operator draws random numbers; each rank uses its part of the numbers of the whole"


def check_recipe(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
) -> Verdict:
    """Compare an operator with itself split over ranks, all in this process.

    Compares the results, the arguments that the operator writes to, and the gradients of all
    floating arguments for two random cotangents. The first comparison is in float64, where rounding
    is no excuse. The second, for the first cotangent, is in the dtype of the call; it measures
    errors against the float64 run.

    Args:
        call: the operator and its arguments, which are not modified.
        recipe: how to split it; several recipes split it along the axes of a mesh.
        ranks: number of ranks; one number for each axis.
        seed: seed of the cotangents and of the terms of partial arguments.
        strict: whether an `unstable` item fails.

    Raises:
        UsageError: the recipe does not fit the call, or the number of ranks is invalid.
    """
    verdict = examine_recipe(call, recipe, ranks, seed=seed, strict=strict).verdict
    remember_failed(verdict, failed_split(verdict, call, recipe, ranks, seed=seed))
    return verdict


def examine_recipe(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
    wholes: Wholes | None = None,
) -> ExaminedRecipe:
    """Like `check_recipe`, but also return the runs that were compared.

    Args:
        wholes: runs of the whole operator, shared by all recipes of the same call and seed.
    """
    levels = mesh_levels(call, recipe, ranks)
    shared = wholes if wholes is not None else Wholes()
    state = Streams.of(call)
    try:
        with _team_for(levels) as team:
            runner = shared.runner_for(call, levels, seed, team)
            check = RecipeCheck(runner, strict=strict, wholes=shared)
            verdict = check.verdict()
            if check.native is not None and check.native[1] is None and runner.lost is None:
                # The verdict needed only float64, but the native results are reported too.
                split = runner.split(wide=False, cotangents=0)
                check.native = check.native[0], split
    finally:
        state.restore()
    return ExaminedRecipe(verdict, check.native, check.lifted)


def _team_for(levels: Levels) -> contextlib.AbstractContextManager[Team | None]:
    """Threads for ranks that communicate; otherwise the ranks run one after the other."""
    if not any(recipe.exchanges for recipe, _ in levels):
        return contextlib.nullcontext()
    from paritas.sharding.operators.ranks.threads import ThreadTeam

    return ThreadTeam(levels[0][1])


class Wholes:
    """The runs of a call that is not split; they do not depend on the recipe."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.native: OperatorRun | None = None
        self.lifted: OperatorRun | None = None
        self.notes: list[str] = []

    def runner_for(
        self, call: OperatorCall, levels: Levels, seed: int, team: Team | None = None
    ) -> Runner:
        """A runner that reuses the first run; without a team the parts run one by one."""
        if team is None:
            runner = Runner(call, levels, seed)
        else:
            runner = RemoteRunner(call, levels, seed, team)
        if self.runner is None or self.native is None:
            self.runner = runner
            return runner
        if self.runner.call is not call or self.runner.seed != seed:
            raise UsageError("cannot reuse the runs of another call or seed")
        runner.take_over(self.runner)
        return runner


@dataclasses.dataclass(frozen=True)
class ExaminedRecipe:
    """A verdict and the runs behind it.

    Attributes:
        native: the whole operator and the ranks, in the dtype of the call; None if it did not run.
        lifted: the same in float64, if both ran.
    """

    verdict: Verdict
    native: tuple[OperatorRun, OperatorRun | None] | None = None
    lifted: tuple[OperatorRun, OperatorRun] | None = None


def mesh_levels(
    call: OperatorCall, recipe: Recipe | tuple[Recipe, ...], ranks: int | tuple[int, ...]
) -> Levels:
    """The recipe and the number of ranks for each axis of the mesh.

    Raises:
        UsageError: they do not fit each other or the call.
    """
    recipes = (recipe,) if isinstance(recipe, Recipe) else tuple(recipe)
    counts = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if len(recipes) != len(counts) or not recipes:
        message = f"got {len(recipes)} recipes and {len(counts)} numbers of ranks"
        raise UsageError(f"{message}; give one number of ranks for each recipe")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"the number of ranks must be 1 or more, got {count!r}")
    if len(recipes) > 1 and any(axis_recipe.exchanges for axis_recipe in recipes):
        raise UsageError(
            "a recipe whose ranks communicate cannot be one axis of a mesh; check it alone"
        )
    known_places = [*range(len(call.args)), *call.kwargs]
    for level_recipe in recipes:
        # The ranks are given a group even if the call has no such keyword.
        groups = {
            p for p, rule in level_recipe.numbers if isinstance(rule, Group) and isinstance(p, str)
        }
        for argument_place, _ in (*level_recipe.inputs, *level_recipe.numbers):
            if argument_place not in known_places and argument_place not in groups:
                have = ", ".join(map(name_of, known_places)) or "no arguments"
                raise UsageError(
                    f"the recipe names {name_of(argument_place)}, but the call has {have}"
                )
    return tuple(zip(recipes, counts, strict=True))


def drifting(verdict: Verdict, call: OperatorCall, recipe: Recipe) -> tuple[str, ...]:
    """For a split that is right, the arguments of which each rank has its own value afterwards.

    These are the arguments that the rule leaves to the ranks, if they differ from the whole's.
    """
    if not verdict.passed:
        return ()
    compared = {finding.item for finding in verdict.findings}
    return tuple(
        argument_words(call, argument_place)
        for argument_place, placement in recipe.inputs
        if placement == Replicate(own=True) and after_call(name_of(argument_place)) not in compared
    )


class RecipeCheck:
    """One check, from its first run to its verdict."""

    def __init__(self, runner: Runner, *, strict: bool, wholes: Wholes | None = None) -> None:
        self.runner = runner
        self.strict = strict
        self.wholes = Wholes() if wholes is None else wholes
        self.notes: list[str] = []
        self.skipped: list[str] = []
        self.native: tuple[OperatorRun, OperatorRun | None] | None = None
        self.lifted: tuple[OperatorRun, OperatorRun] | None = None

    def verdict(self) -> Verdict:
        """Run what is needed, and judge it."""
        try:
            verdict = self._verdict()
        except LostRankError as error:
            self.runner.lost = error
        if self.runner.lost is not None:  # the error may have been caught on the way
            advice = "check it in one process to see what it raises"
            lost = unverified("ranks", str(self.runner.lost), advice)
            return Verdict(findings=(lost,), strict=self.strict)
        return verdict

    def _verdict(self) -> Verdict:
        whole_run = self._first_run()
        if whole_run.error is not None:
            return self._end_failed(whole_run.error, whole=True)
        self.native = whole_run, None
        if not whole_run.results:
            reason = "nothing to compare: the operator returns nothing and writes to no argument"
            return self._end(unverified(output(), reason))
        narrow = self.runner.narrow
        lifted_whole = self._lifted_run(whole_run)
        lifted_split = self.runner.split(wide=True)
        if lifted_split.error is not None:
            return self._end_failed(lifted_split.error)
        self.lifted = lifted_whole, lifted_split
        early = self._compare_structure(lifted_whole, lifted_split)
        if early is not None:
            return early
        native_split = self.runner.split(wide=False, cotangents=1) if narrow else lifted_split
        if native_split.error is not None:
            return self._end_failed(native_split.error)
        self.native = whole_run, native_split
        return self._compare((whole_run, native_split), (lifted_whole, lifted_split))

    def _lifted_run(self, native: OperatorRun) -> OperatorRun:
        """The whole in float64; if it mixes dtypes inside, again with all of them widened."""
        runner = self.runner
        if self.wholes.lifted is None:
            self.wholes.lifted = runner.whole(wide=True) if runner.narrow else native
            if self.wholes.lifted.error is not None:
                runner.lifting = True
                self.wholes.lifted = runner.whole(wide=True)
            if self.wholes.runner is not None:
                self.wholes.runner.lifting = runner.lifting
        return self.wholes.lifted

    def _first_run(self) -> OperatorRun:
        """The native run of the whole; if it draws random numbers, again to keep them."""
        if self.wholes.native is None:
            runner, notes = self.runner, self.wholes.notes
            before = Streams.of(runner.call)
            cotangents = 1 if runner.narrow else 2
            whole_run = runner.whole(wide=False, cotangents=cotangents)
            if whole_run.error is None and before.moved_by(runner.call):
                runner.draws = Draws()
                notes.append(DRAWS)
                whole_run = runner.whole(wide=False, cotangents=cotangents)
            self.wholes.native = whole_run
        self.notes = list(self.wholes.notes)
        return self.wholes.native

    # --- verdicts --------------------------------------------------------------------------------

    def _compare_structure(self, operator_run: OperatorRun, split: OperatorRun) -> Verdict | None:
        """A verdict if the results do not correspond, so that values cannot be compared."""
        if operator_run.error is not None:
            reason = f"the operator does not run in float64: {in_one_line(operator_run.error)}"
            return self._end(unverified(output(), reason))
        findings: list[Finding] = []
        for item, value in operator_run.results.items():
            other = split.results.get(item)
            if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            if value.shape != other.shape:
                reason = f"shape {list(other.shape)} instead of {list(value.shape)}"
                dtype, shape = dtype_name(value.dtype), tuple(value.shape)
                findings.append(mismatch(item, Aspect.SHAPE, reason, dtype=dtype, shape=shape))
        if operator_run.results.keys() != split.results.keys():
            counts = f"{len(split.results)} results instead of {len(operator_run.results)}"
            findings.append(mismatch(output(), Aspect.STRUCTURE, counts))
        if not findings:
            return None
        self.skipped = ["values and gradients: the results have different shapes"]
        return self._verdict_of(findings, len(operator_run.results))

    def _end_failed(self, error: Exception, *, whole: bool = False) -> Verdict:
        """The verdict if a forward pass raised."""
        text = first_line(error, 1000)
        if isinstance(error, RankError):
            return self._end(mismatch(output(), Aspect.EXCEPTION, text))
        if isinstance(error, UsageError):
            return self._end(unverified(output(), text))
        words = in_one_line(error)
        if whole:
            reason = f"the operator itself fails: {words}"
            return self._end(unverified(output(), reason, aspect=Aspect.EXCEPTION))
        return self._end(unverified(output(), f"the split run failed: {words}"))

    def _end(self, finding: Finding) -> Verdict:
        return self._verdict_of([finding], int(finding.status is Status.DIFFERENT))

    def _verdict_of(self, findings: Sequence[Finding], compared: int) -> Verdict:
        return Verdict(
            findings=tuple(findings),
            coverage=Coverage(compared=compared, skipped=tuple(dict.fromkeys(self.skipped))),
            notes=tuple(dict.fromkeys(self.notes)),
            strict=self.strict,
        )

    # --- values ----------------------------------------------------------------------------------

    def _compare(
        self, native: tuple[OperatorRun, OperatorRun], lifted: tuple[OperatorRun, OperatorRun]
    ) -> Verdict:
        findings = self._gradient_errors(native, lifted)
        wholes, splits = (run_items(run) for run in lifted)
        references, candidates = (run_items(run) for run in native)
        judged: dict[Item, list[Finding]] = {}
        unsettled: list[Item] = []
        for key, value in wholes.items():
            if key not in splits:
                continue
            other = splits[key]
            if value is None and other is None:
                if key not in lifted[0].results:
                    self.skipped.append(f"{shown_item(key)}: nothing depends on it")
                continue
            if key in self.runner.own and not near_in_float64(value, other):
                self._note_own(key, value)
                continue
            status = _settle(value, other, key, references, candidates)
            if status is None:
                unsettled.append(key)
            else:
                pair = Pair(shown_item(key), value, other)
                judged[key] = [settle_pair(pair, Ruling(status))]
        if unsettled:
            judge = NoiseJudge(self.runner, lifted)
            judged |= {key: judge.judge(key) for key in unsettled}
            self.notes += judge.notes
        findings += _keep_gravest({key: judged[key] for key in wholes if key in judged})
        return self._verdict_of(findings, len(judged))

    def _note_own(self, item: Item, whole_value: Any) -> None:
        """Note how far a value that the rule leaves to each rank is from the whole's."""
        own_values = self.runner.own[item]
        name, parts = argument_words(self.runner.call, own_values.place), own_values.parts
        typical = criterion.rms(whole_value)
        apart = max(criterion.rms_difference(part, whole_value) for part in parts)
        share = f"{apart / typical:.2g} times the typical value" if typical else f"{apart:.3g}"
        self.skipped.append(f"{item}: the rule leaves it to each rank")
        self.notes.append(
            f"{name} drifts: after the call each of {len(parts)} ranks has its own value, off by "
            f"up to {share}; the rule covers only outputs and gradients"
        )

    def _gradient_errors(
        self, native: tuple[OperatorRun, OperatorRun], lifted: tuple[OperatorRun, OperatorRun]
    ) -> list[Finding]:
        for whole_run, split in (lifted, native):
            if whole_run.gradient_error is not None:
                words = in_one_line(whole_run.gradient_error)
                # torch has no exception of its own for this.
                if "derivative for" in words and "is not implemented" in words:
                    self.skipped.append("gradients: torch has no derivative for this operator")
                    return []
                reason = f"the operator's own backward pass fails: {words}"
                return [unverified(GRADIENTS, reason, aspect=Aspect.EXCEPTION)]
            if split.gradient_error is not None:
                reason = (
                    f"the backward pass on the ranks raised {in_one_line(split.gradient_error)}"
                )
                return [mismatch(GRADIENTS, Aspect.EXCEPTION, reason)]
            if bool(whole_run.gradients) != bool(split.gradients):
                side = "whole" if whole_run.gradients else "split"
                reason = f"only the {side} operator can be differentiated"
                return [mismatch(GRADIENTS, Aspect.REQUIRES_GRAD, reason)]
        return []


def _settle(
    whole_value: Any,
    split: Any,
    key: Item,
    references: dict[Item, Any],
    candidates: dict[Item, Any],
) -> Status | None:
    """The status of an item, if it can be known without measuring noise."""
    if not isinstance(whole_value, torch.Tensor):
        same = type(whole_value) is type(split) and whole_value == split
        return Status.IDENTICAL if same else None
    if not near_in_float64(whole_value, split):
        return None
    reference, candidate = references.get(key), candidates.get(key)
    # The second cotangent is not sent natively; a float64 operator has no other native run.
    if (
        key in references
        and key in candidates
        and not (reference is whole_value and candidate is split)
    ):
        return near_natively(reference, candidate, whole_value)
    return Status.IDENTICAL if torch.equal(whole_value, split) else Status.EQUIVALENT


def _keep_gravest(judged: dict[Item, list[Finding]]) -> list[Finding]:
    """The findings of each item for the cotangent with the gravest status."""
    gravest: dict[Item, list[Finding]] = {}
    for key, findings in judged.items():
        gravest_findings = gravest.setdefault(shown_item(key), findings)
        if _gravity(findings) > _gravity(gravest_findings):
            gravest[shown_item(key)] = findings
    return [finding for findings in gravest.values() for finding in findings]


def _gravity(findings: list[Finding]) -> int:
    return max(finding.status.gravity for finding in findings)


# --- Confirming on real ranks ---------------------------------------------------------------------


def check_confirm(confirm: BackendName | None, device: torch.device, ranks: int) -> None:
    """Refuse a confirmation that is not possible on this machine.

    Args:
        device: device on which the operator is checked.
        ranks: largest number of ranks.

    Raises:
        UsageError: the ranks cannot be started; the message says what is missing.
    """
    if confirm is None:
        return
    backend = RANK_BACKENDS.get(confirm)
    if backend is None:
        names = ", ".join(map(repr, RANK_BACKENDS))
        raise UsageError(f"confirm must be {names} or None, got {confirm!r}")
    if not backend.needs_own_device:
        return
    if device.type != backend.device:
        raise UsageError(
            f"NCCL needs tensors on GPUs, but the device is {str(device)!r}: use --device cuda "
            "(device='cuda'), or confirm with gloo"
        )
    if not distributed.is_nccl_available():
        raise UsageError("this torch is built without NCCL: confirm with gloo")
    have = torch.cuda.device_count()
    if have < ranks:
        raise UsageError(
            f"NCCL needs one GPU for each of {ranks} ranks, but torch sees {have}: confirm with "
            "gloo, whose ranks can share a GPU, or use fewer ranks"
        )


def confirmation(
    confirm: BackendName,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int = 0,
    strict: bool = False,
    imports: Sequence[str] = (),
) -> Verdict:
    """The verdict of real ranks about a recipe, its items labelled with the kind of ranks.

    Args:
        imports: modules that each rank imports first because they define the operator.
    """
    from paritas.sharding.operators.ranks.threads import ProcessTeam, check_on_team

    count = math.prod(ranks) if isinstance(ranks, tuple) else ranks
    check_confirm(confirm, device_of(call), count)
    team = ProcessTeam(confirm, imports=tuple(imports))
    real = check_on_team(call, recipe, ranks, team=team, seed=seed, strict=strict)
    return label_items(real, f"on {confirm} ranks")


def label_items(verdict: Verdict, option: str) -> Verdict:
    """The verdict with each item under a label: the option that was split, or the ranks."""
    findings = tuple(
        msgspec.structs.replace(finding, item=finding.item.under(option))
        for finding in verdict.findings
    )
    coverage = Coverage(
        compared=verdict.coverage.compared,
        skipped=tuple(f"{option}, {item}" for item in verdict.coverage.skipped),
        unmatched=tuple(f"{option}, {item}" for item in verdict.coverage.unmatched),
    )
    return msgspec.structs.replace(verdict, findings=findings, coverage=coverage)
